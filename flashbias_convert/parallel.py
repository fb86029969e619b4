"""Patched models on several processes: heads that are split, and sites that are shared out.

A patched model can be wrapped by DDP and by FSDP2 as it is: its terms are buffers, of which every
process keeps all; terms that are trained are parameters like others. Tensor parallelism splits
heads, and the terms must follow: `shard_sites`.

Terms belong to weights. Other weights are noticed at each call where this process has them. Inside
FSDP, and while accelerate keeps a weight elsewhere, that cannot be looked up: they are noticed when
a state dict is loaded and when training mode is left. Until then a weight that was written to in
place serves with the terms of the old one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from .assignment import assigned
from .errors import FlashBiasError, UsageError
from .modules import ScoreBiasModule
from .patched_attention import PatchedAttention
from .split_layers import mark_split
from .swap import SUBMODULE, patched_modules

T = TypeVar("T")
#: which call of all, its result, and what went wrong
Entry = tuple[int, Any, Exception | None]


# -- tensor parallelism --------------------------------------------------------------------


def shard_sites(model: nn.Module, mesh: DeviceMesh) -> int:
    """Keep, at every patched site, the terms of this process's share of the heads.

    The projections are the business of `parallelize_module`, before or after: those to q, k and v
    by columns, so that process r of P has the heads from r * H / P on (`ColwiseFused` for one
    layer that makes all three), the one after attention by rows. Then a model whose code counts
    heads computes with its share, and so do caches. It serves only: the original forward does not
    run any more, and the model cannot be saved or unpatched.

    Args:
        model: a patched model, the same on all processes.
        mesh: one dimension; its processes share the heads.

    Returns:
        How many sites were split.

    Raises:
        UsageError: nothing is patched, a site is split already or its recipe does not say how, the
            heads of one cannot be shared out evenly, or a layer that makes q, k and v was split by
            the style for another order of its rows (a call finds that if it is split afterwards).
            The model is as it was.
    """
    if mesh.ndim != 1:
        raise UsageError(f"the mesh must have one dimension, it has {mesh.ndim}")
    sites = patched_modules(model)
    if not sites:
        raise UsageError("no module of this model is patched", "call patch_model first")
    parts, part = mesh.size(), mesh.get_local_rank()
    for site in sites:
        _require_even(site, parts)
    for site in sites:
        _shard_site(site, parts, part)
    return len(sites)


def _require_even(site: PatchedAttention, parts: int) -> None:
    name = site.original_class.__name__
    if site.split_over > 1:
        raise UsageError(f"the heads of this {name} are split already")
    if not site.head_counts:
        raise UsageError(f"the recipe of {name} does not say how its heads can be split")
    if site.trains_terms:
        raise UsageError(f"the terms of this {name} are trained: their heads cannot be split")
    site.check_fresh(by_values=True)
    heads = {site.score_bias.bias.num_heads, *(getattr(*_place(site, n)) for n in site.head_counts)}
    uneven = [count for count in heads if not isinstance(count, int) or count % parts]
    if uneven:
        raise UsageError(f"{uneven[0]} heads of a {name} cannot be split over {parts} processes")
    for attribute in site.head_values:
        value = getattr(site, attribute, None)
        if value is not None and (not isinstance(value, Tensor) or value.shape[0] % parts):
            raise UsageError(f"{attribute} of a {name} cannot be split over {parts} processes")
    if parts > 1:
        site.require_layout()


def _shard_site(site: PatchedAttention, parts: int, part: int) -> None:
    bias, own = site.score_bias.bias, site.score_bias
    share = bias.num_heads // parts
    terms = ScoreBiasModule(
        bias.select_heads(range(part * share, (part + 1) * share)), own.backend, tuple(own.builders)
    )
    terms.keep_heads(range(part * share, (part + 1) * share), bias.num_heads)
    terms.train(site.training)
    terms.mask_memo.doubtful = own.mask_memo.doubtful
    site._modules[SUBMODULE] = terms
    for name in site.head_counts:
        holder, attribute = _place(site, name)
        setattr(holder, attribute, getattr(holder, attribute) // parts)
    for name in site.head_values:
        _keep_part(site, name, parts, part, 0)
    site.split_over = parts
    site.seal()


def _place(site: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has an attribute of a site, and the name that it has there."""
    path, _, attribute = name.rpartition(".")
    return site.get_submodule(path), attribute


def _keep_part(module: nn.Module, name: str, parts: int, part: int, groups: int) -> None:
    """Keep a share of the rows of a parameter or buffer, or of each of its `groups`."""
    tensor = getattr(module, name, None)
    if tensor is None:
        return
    rows = tensor.detach()
    if groups:
        own = rows.unflatten(0, (groups, -1)).chunk(parts, 1)[part].flatten(0, 1).clone()
    else:
        own = rows.chunk(parts, 0)[part].clone()
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(own, requires_grad=tensor.requires_grad)
    else:
        module._buffers[name] = own


class ColwiseFused(ParallelStyle):
    """Splits a linear layer that makes q, k and v one after the other, each of them by heads.

    `ColwiseParallel` would give the first processes q, and the last ones v. Layers whose rows go
    head by head, as those of BLOOM and Falcon, are fine with it. The weights become plain tensors;
    inputs must be the same on all processes.

    Args:
        parts: how many outputs the layer makes, one after the other.
    """

    def __init__(self, parts: int = 3) -> None:
        self._parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UsageError(f"ColwiseFused splits nn.Linear, not {type(module).__name__}")
        parts, part = device_mesh.size(), device_mesh.get_local_rank()
        if module.out_features % (self._parts * parts):
            raise UsageError(
                f"{module.out_features} outputs cannot be split over {parts} processes"
            )
        for name in ("weight", "bias"):
            _keep_part(module, name, parts, part, self._parts)
        module.out_features //= parts
        mark_split(module, self._parts)
        return module


# -- work that is shared out ---------------------------------------------------------------


def spread(
    work: Sequence[Callable[[], T]],
    group: dist.ProcessGroup | None = None,
    *,
    done: Callable[[int], Any] | None = None,
    costs: Sequence[float] | None = None,
) -> list[T]:
    """Results of calls that are shared out over processes; every process gets all, in order.

    Args:
        work: what to call; the same on all processes. Results are sent by pickle, so they should
            lie on the CPU; one that pickle refuses is an exception of its process.
        group: the processes; default all.
        done: told how many of its own calls this process has done, after each.
        costs: how much work each call is, in any unit, the same on all processes: the longest is
            given away first, each to the process that has least to do. It decides who does what,
            and on no result. Default: all cost the same, and each process does every P-th call.

    Raises:
        The first exception that a process met, in the order of `work`, on every process.
        ValueError: there is not one cost for every call.
    """
    parts, part = dist.get_world_size(group), dist.get_rank(group)
    costs = [1.0] * len(work) if costs is None else costs
    if len(costs) != len(work):
        raise ValueError(f"{len(costs)} costs for {len(work)} calls")
    own: list[Entry] = []
    for at in assigned(costs, parts)[part]:
        try:
            own.append((at, _sendable(work[at]()), None))
            if done is not None:
                done(len(own))
        except Exception as error:  # the others wait for this process
            own.append((at, None, _told(error)))
            break
    everywhere: list[Any] = [None] * parts
    dist.all_gather_object(everywhere, own, group=group)
    found = sorted((entry for some in everywhere for entry in some), key=lambda entry: entry[0])
    for _, _, failure in found:
        if failure is not None:
            raise failure
    return [result for _, result, _ in found]


def _sendable(result: T) -> T:
    """The same result, tried out before all are sent at once: then the others would wait.

    Raises:
        UsageError: pickle refuses it.
    """
    try:
        pickle.dumps(result)
    except Exception as error:  # classes raise what they like
        raise UsageError(
            f"a result of type {type(result).__name__} cannot be sent to the other processes: "
            f"{type(error).__name__}: {error}",
            "return what pickle takes, such as tensors and numbers",
        ) from error
    return result


def _told(error: Exception) -> Exception:
    """The exception that all processes raise: the same, or its text where a pickle loses it."""
    try:
        if isinstance(error, FlashBiasError) or type(error).__module__ == "builtins":
            pickle.loads(pickle.dumps(error))  # own bytes: nothing foreign is read
            return error
    except Exception:  # it holds something that cannot be sent
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


__all__ = ["ColwiseFused", "shard_sites", "spread"]
