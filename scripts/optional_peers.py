"""Attention by packages that may not be installed, for the benchmark scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from flashbias_convert.attention.sdpa import scaled
from flashbias_convert.benchmark.calls import AttentionCall
from flashbias_convert.terms import Alibi, Dense

#: what a function of nothing returns is (*batch, H, N, Dv)
Call = Callable[[], Tensor]
#: the state of a peer whose package is not there; the row's note says which
NOT_INSTALLED = "not installed"
#: module that a peer imports, by its name. FlashAttention 4 alone is a folder `flash_attn` without
#: a module of version 2, and imports as an empty package.
MODULES = {
    "flash-attn, alibi": "flash_attn.flash_attn_interface",
    "flash-attn 3, no bias": "flash_attn_interface",
    "flash-attn 4, no bias": "flash_attn.cute",
    "xformers, dense": "xformers",
    "cuequivariance, dense": "cuequivariance_torch",
}


class NotInstalled(ImportError):
    """A peer whose package is not there."""


@dataclass(frozen=True)
class Optional:
    """A peer of a package.

    Attributes:
        name: as printed.
        make: builds what can be built before the clock runs, and gives the call. Raises
            NotInstalled, before it builds anything, where the package is not there.
    """

    name: str
    make: Callable[[], Call]


def optional_peers(
    call: AttentionCall, dense: Callable[[AttentionCall], Tensor]
) -> Iterator[Optional]:
    """What can compute the call, installed or not; `dense` makes its dense bias."""
    alone = call.bias.terms[0] if len(call.bias.terms) == 1 else None
    if isinstance(alone, Alibi):
        yield _offer("flash-attn, alibi", lambda: _flash_attn(call, alone))
    yield _offer("xformers, dense", lambda: _xformers(call, dense(call)))
    shared = isinstance(alone, Dense) and alone.bias.dim() == 3
    plain = not call.args.causal and not call.args.cosine
    if shared and plain and call.q.dim() == 4:
        yield _offer("cuequivariance, dense", lambda: _cuequivariance(call, dense(call)))


def optional_without_bias(call: AttentionCall) -> Iterator[Optional]:
    """What can compute the call without its bias, installed or not."""
    start = call.args.query_start
    last = isinstance(start, int) and start == call.k.shape[-2] - call.q.shape[-2]
    if call.args.key_mask is None and (last or not call.args.causal):
        for name in ("flash-attn 3, no bias", "flash-attn 4, no bias"):
            yield _offer(name, lambda module=MODULES[name]: _without_bias(call, module))


def is_installed(module: str) -> bool:
    """Whether a module can be found; neither it nor a package around it is imported."""
    if module in sys.modules:
        return sys.modules[module] is not None
    path, parts = None, module.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(name, path, None) for find in finders if find is not None)
        spec = next((found for found in specs if found is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def is_stale(row: Mapping[str, Any]) -> bool:
    """Whether a row says of a package that it is not installed, and by now it is."""
    module = MODULES.get(row["peer"])
    return row.get("state") == NOT_INSTALLED and module is not None and is_installed(module)


def not_installed(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line that names each peer that was not installed once; empty if there is none."""
    found = {r["peer"]: r.get("note") for r in rows if r.get("state") == NOT_INSTALLED}
    named = "; ".join(f"{peer} ({note})" if note else peer for peer, note in found.items())
    return f"{NOT_INSTALLED}: {named}" if named else ""


def _offer(name: str, make: Callable[[], Call]) -> Optional:
    def made() -> Call:
        if not is_installed(MODULES[name]):
            raise NotInstalled(f"no module {MODULES[name]}")
        return make()

    return Optional(name, made)


def _without_bias(call: AttentionCall, module: str) -> Call:
    """`flash_attn_func` of FlashAttention 3 or 4: everything in (batch, N, H, D).

    Some releases return the output alone, others the logarithms of the sums beside it.
    """
    attend = import_module(module).flash_attn_func

    def run() -> Tensor:
        query, key, scale = scaled(call.q, call.k, call.args)
        q, k, v = (x.flatten(0, -4).transpose(1, 2) for x in (query, key, call.v))
        out = attend(q, k, v, softmax_scale=scale, causal=call.args.causal)
        out = (out if isinstance(out, Tensor) else out[0]).transpose(1, 2)
        return out.reshape(*call.batch, *out.shape[-3:])

    return run


def _flash_attn(call: AttentionCall, term: Alibi) -> Call:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    q, k, v = (x.flatten(0, -4).transpose(1, 2) for x in (call.q, call.k, call.v))
    slopes = term.slopes.float()

    def run() -> Tensor:
        out = flash_attn_func(
            q, k, v, softmax_scale=call.args.scale, causal=call.args.causal, alibi_slopes=slopes
        ).transpose(1, 2)
        return out.reshape(*call.batch, *out.shape[-3:])

    return run


def _xformers(call: AttentionCall, mask: Tensor) -> Call:
    """Its memory-efficient attention with a tensor as bias, everything in (batch, N, H, D)."""
    from xformers.ops import memory_efficient_attention  # type: ignore[import-not-found]

    if any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*call.batch, *mask.shape[-3:])
    flat = mask.reshape(-1, *mask.shape[-3:])
    entries = call.q.shape[:-3].numel()
    bias = flat.expand(entries, *flat.shape[1:])

    def run() -> Tensor:
        query, key, scale = scaled(call.q, call.k, call.args)
        q, k, v = (x.flatten(0, -4).transpose(1, 2) for x in (query, key, call.v))
        out = memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale).transpose(1, 2)
        return out.reshape(*call.batch, *out.shape[-3:])

    return run


def _cuequivariance(call: AttentionCall, mask: Tensor) -> Call:
    """Triangle attention: rows (1, N, H, N, D) that share one bias (1, 1, H, N, N)."""
    from cuequivariance_torch import triangle_attention  # type: ignore[import-not-found]

    q, k, v = (x[None] for x in (call.q, call.k, call.v))
    bias = mask.reshape(1, 1, *mask.shape[-3:]).contiguous()
    return lambda: triangle_attention(q, k, v, bias, scale=call.args.scale)[0]
