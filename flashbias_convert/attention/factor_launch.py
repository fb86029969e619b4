"""Launches the kernels of `triton_columns`, with all that depends on shapes worked out once."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..terms.constants import is_watched
from .factors import scale_size
from .launch_plan import MAX_PLANS, LaunchPlan, layout_of
from .strides import MAX_BATCH_DIMS, batch_strides, collapse_batch, own_strides, padded

#: Numbers that one program writes, about.
TILE = 2048

#: by what a launch looks like
_PLANS: dict[Hashable, LaunchPlan] = {}
_TOPS = ("top_q", "top_k")
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def is_served(*tensors: Tensor) -> bool:
    """Whether the kernels write the columns: on a card, for tensors that are real."""
    if torch.compiler.is_compiling():
        return False
    recorded = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    # a mode would miss a launch
    return not recorded and not is_watched() and all([_is_readable(t) for t in tensors])


def _is_readable(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return False
    if tensor.dim() - 3 > MAX_BATCH_DIMS:
        return False
    if tensor.is_cuda:
        return tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    # Triton's interpreter takes bf16 for raw bits
    return _INTERPRETED and tensor.dtype in (torch.float32, torch.float16)


def launch_columns(
    factors: tuple[Tensor, Tensor],
    tops: Sequence[Tensor],
    split: int,
    outs: Mapping[str, Tensor],
    *,
    scale: float | Tensor | None,
) -> None:
    """Write the columns of both factors; see `factor_columns`.

    Args:
        factors: phi_q and phi_k, (*batch, H, N or M, R), with batch dimensions that `is_served` has
            allowed.
        tops: of both, see `factors.column_tops`; none for factors that need no balance.
        split: how many columns become triples: of high and low parts, or the same number three
            times for queries without a scale.
        outs: "out_q" and "out_k", contiguous (*batch, H, N or M, COLUMNS), and where they are
            wanted in another dtype, too, "again_q" and "again_k". Zeros are written past the last
            column.
        scale: by whose size phi_q is divided, fp32 (H,) if heads differ in it.
    """
    given = dict(zip(("phi_q", "phi_k", *_TOPS), (*factors, *tops), strict=False))
    tensors, device, size = {**given, **outs}, factors[0].device, None
    if isinstance(scale, Tensor):
        tensors["scales"] = scale
    elif scale is not None:
        size = float(scale_size(scale))  # of an integer Triton might make a constant
        size = _reciprocal(size) if device.type == "cuda" else size
    key = (device, split, scale is None, *tensors, *layout_of(tensors.values()))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _keep(key, _columns_plan(tensors, split, scale, device.type == "cuda"))
    plan.run(device, tensors.values(), () if size is None else (size,))


def launch_gradients(
    found: Mapping[str, Tensor], tops: Sequence[Tensor], split: int, outs: Mapping[str, Tensor]
) -> None:
    """Write gradients of factors; see `column_gradients`.

    Args:
        found: "found_q" or "found_k" or both, fp32 (*batch, H, N or M, COLUMNS).
        tops, split: as for `launch_columns`.
        outs: "out_q" or "out_k" or both, contiguous (*batch, H, N or M, R) in any dtype that a
            factor has.
    """
    tensors = {**found, **dict(zip(_TOPS, tops, strict=True)), **outs}
    device = tops[0].device
    key = (device, split, *tensors, *layout_of(tensors.values()))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _keep(key, _gradients_plan(tensors, split))
    plan.run(device, tensors.values())


def _keep(key: Hashable, plan: LaunchPlan) -> LaunchPlan:
    if len(_PLANS) >= MAX_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan
    return plan


@lru_cache(maxsize=MAX_PLANS)
def _reciprocal(number: float) -> float:
    """1 / `number` as fp32 has it: what torch multiplies by to divide by a number on a card."""
    return ctypes.c_float(1.0 / ctypes.c_float(number).value).value


def _columns_plan(
    tensors: Mapping[str, Tensor], split: int, scale: float | Tensor | None, inverse: bool
) -> LaunchPlan:
    from .triton_columns import factor_columns_kernel as kernel

    columns = tensors["out_q"].shape[-1]
    arguments = {
        "R": tensors["phi_q"].shape[-1],
        "split": split,
        "COLUMNS": columns,
        "WHOLE": scale is None,
        "INVERSE": inverse,
        "ROWS": max(1, TILE // columns),
    }
    numbers = [] if scale is None or "scales" in tensors else ["size"]
    return _plan(kernel, arguments, tensors, numbers, "phi")


def _gradients_plan(tensors: Mapping[str, Tensor], split: int) -> LaunchPlan:
    from .triton_columns import factor_gradients_kernel as kernel

    rank = tensors["top_q"].shape[-1]
    width = padded(rank)
    arguments = {"R": rank, "split": split, "WIDTH": width, "ROWS": max(1, TILE // width)}
    return _plan(kernel, arguments, tensors, [], "found")


def _plan(
    kernel: Any,
    arguments: dict[str, Any],
    tensors: Mapping[str, Tensor],
    numbers: list[str],
    walked: str,
) -> LaunchPlan:
    """A launch whose programs walk one or both of the matrices `walked` + "_q" and "_k"."""
    values = {name: arguments.get(name) for name in kernel.arg_names}
    programs = {"q": 0, "k": 0}
    for end in programs:
        matrix = tensors.get(f"{walked}_{end}")
        if matrix is not None:
            walk, matrices = _walk(matrix, tensors.get(f"top_{end}"))
            values[f"walk_{end}"] = walk
            programs[end] = -(-walk.rows // arguments["ROWS"]) * matrices
    values["programs_q"] = programs["q"]
    return LaunchPlan(
        kernel,
        values,
        tensors,
        numbers,
        grid=programs["q"] + programs["k"],
        # products that were merged with sums would be rounded once, where torch rounds twice
        options={"enable_fp_fusion": False},
    )


def _walk(walked: Tensor, top: Tensor | None) -> tuple[Any, int]:
    """A `FactorWalk` through a matrix, with `top` of the same factor; and how many matrices."""
    from .triton_columns import FactorWalk

    batch, (heads, n) = tuple(walked.shape[:-3]), walked.shape[-3:-1]
    both = [batch_strides("q", t, batch) for t in (walked, walked if top is None else top)]
    sizes, strides = collapse_batch(batch, both)
    lead = MAX_BATCH_DIMS - len(sizes)
    sizes, (own, of_top) = [1] * lead + sizes, ([0] * lead + s for s in strides)
    head = 0 if top is None or top.shape[-3] == 1 else top.stride(-3)
    own_walk, top_walk = (*own, *own_strides("q", walked)), (*of_top, head)
    walk = FactorWalk(n, sizes[1], sizes[2], heads, own_walk, top_walk)
    return walk, heads * math.prod(sizes)
