"""Which launches the Hopper kernel serves; nothing here imports Triton's compiler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ..packing import GroupSpec
from .forms import (
    ALIBI,
    ALONE,
    BESIDE,
    FALLING,
    KEY_BIAS,
    NO_BIAS,
    RISING,
    SMALL,
    Form,
)

#: versions of Triton, whose Gluon the kernel was tested with on a card
VERSIONS = ((3, 6),)
CAPABILITY = (9, 0)
#: by head size: padded columns of factors that fit the memory of a multiprocessor
COLUMNS = {64: (0, 16, 32, 64, 128), 128: (0, 16, 32, 64)}
#: by kind of a call and head size: fewest tokens from which on it was faster, see
#: scripts/results/tune_hopper.csv
SHORTEST = {
    ("plain", 64): 1024, ("plain", 128): 512,
    ("causal", 64): 512, ("causal", 128): 512,
    ("alibi", 64): 512, ("alibi", 128): 512,
    ("key bias", 64): 1500, ("key bias", 128): 512,
    ("distances", 64): 512,
}  # fmt: skip
#: fewest scores of a call that are not hidden, at heads of 64; half as many at heads of 128. With
#: less the host takes longer to describe tensors than the card works.
FEWEST_SCORES = 2**28
#: and of those with tables by distance that have one pass, which ends sooner on the host
FEWEST_OF_ONE_PASS = 2**24
#: what fp16 pays for, which has no range for quick steps
FP16 = frozenset({("plain", 128), ("causal", 128), ("alibi", 128), ("key bias", 128),
                  ("causal", 64), ("alibi", 64), ("distances", 64)})  # fmt: skip
#: with fewer tokens two programs beside each other were faster than warpgroups in turns, D = 64
TURNS_FROM = 1536
#: most columns with which two programs fit the memory of a multiprocessor
BESIDE_COLUMNS = 64
#: with fewer tokens a second launch takes longer than steps save that follow the largest score
QUICK_DISTANCES_FROM = 1024
#: with fewer tokens looking for keys without weight costs more than they do
REACH_FROM = 2048
#: queries of a warpgroup, of which a program has one or two
ROWS = 64
#: most blocks of queries that a multiprocessor may have to look at in the second pass
MARKS = 2048
LOG2E = math.log2(math.e)
_EVERY = frozenset({"q", "k", "v", "o"})
_OWN = {
    "plain": (frozenset(), frozenset({"phi_q", "phi_k"})),
    "alibi": (frozenset({"slopes"}),),
    "key bias": (frozenset({"key_bias"}),),
    "distances": (frozenset({"table", "codes_q", "codes_k"}),),
}


def form_of(
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    *,
    plain_scale: bool,
    causal: bool,
    cosine: bool,
    bounded: bool,
) -> Form | None:
    """How the kernel computes a call, or None where it cannot, or is not worth it.

    Args:
        plain_scale: one number for all heads, positive and no tiny one.
        spec, tensors, causal, cosine, bounded: see `launch.launch`.
    """
    kind = _kind(spec, tensors, causal)
    if kind is None or cosine or bounded or not plain_scale or not _knows(spec):
        return None
    q = tensors["q"]
    n, d = q.shape[-2:]
    if q.dim() not in (3, 4) or spec.columns not in COLUMNS.get(d, ()):
        return None
    if n < SHORTEST.get((kind, d), n + 1) or not _in_half((kind, d), q.dtype):
        return None
    form = _chosen(kind, Form(d, spec.columns, causal=causal, bias=_bias(kind, spec)), n)
    fewest = FEWEST_SCORES if form.quick else FEWEST_OF_ONE_PASS
    if n * q.numel() < 64 * fewest * (1 + causal):
        return None
    return form if _can_copy(tensors) and works() and is_there(q.device) else None


def _knows(spec: GroupSpec) -> bool:
    return spec.heads is None and not spec.symmetric and (spec.scaled or not spec.columns)


def _in_half(call: tuple[str, int], dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 or (dtype == torch.float16 and call in FP16)


def _kind(spec: GroupSpec, tensors: Mapping[str, Tensor], causal: bool) -> str | None:
    more = frozenset(tensors) - _EVERY
    for kind, sets in _OWN.items():
        if more in sets:
            if kind == "plain":
                return "causal" if causal else kind
            if kind == "distances":
                return kind if spec.by_distance else None
            return kind if causal == (kind == "alibi") else None
    return None


def _bias(kind: str, spec: GroupSpec) -> int:
    if kind == "distances":
        return RISING if spec.by_distance > 0 else FALLING
    return {"alibi": ALIBI, "key bias": KEY_BIAS}.get(kind, NO_BIAS)


def _chosen(kind: str, form: Form, n: int) -> Form:
    """The form that was measured to be the fastest for n tokens."""
    if kind == "alibi":
        form = replace(form, reach=n >= REACH_FROM)
    if form.head != 64:
        return form
    if kind == "distances":
        return _with_tail(replace(form, **SMALL, quick=n >= QUICK_DISTANCES_FROM), n)
    if kind == "key bias":
        return _with_tail(replace(form, **ALONE), n)
    if form.columns <= BESIDE_COLUMNS and (form.causal or n < TURNS_FROM):
        return _with_tail(replace(form, **BESIDE), n)
    return form


def _with_tail(form: Form, n: int) -> Form:
    """A smaller last tile where few keys are left."""
    rest = 0 if form.causal or n < form.keys else n % form.keys
    return replace(form, tail=next((t for t in (16, 32) if 0 < rest <= t), 0))


def _can_copy(tensors: Mapping[str, Tensor]) -> bool:
    q = tensors["q"]
    heads = q.shape[-3]
    if any(tensors[name].shape != q.shape for name in ("k", "v", "o")):
        return False
    for name, x in tensors.items():
        if name.startswith("codes"):
            if x.dim() != 1 or x.stride(0) != 1 or x.dtype != torch.int32:
                return False
        elif name == "table":
            if x.dim() != 2 or x.stride(1) != 1 or x.dtype != torch.float32:
                return False
        elif name == "slopes":
            if x.shape != (heads,) or not x.is_contiguous() or x.dtype != torch.float32:
                return False
        elif name == "key_bias":
            if rows_of(x) is None or x.dtype != torch.float32:
                return False
        elif name.startswith("phi"):
            if x.dim() not in (3, 4) or x.dtype != torch.float16 or not copyable(x, x.dim() - 2):
                return False
        elif not copyable(x):
            return False
    return True


def rows_of(x: Tensor) -> tuple[int, int, int] | None:
    """A bias per key, (B, H, M) or (H, M), as rows that the card can copy.

    Returns:
        Numbers from a row to the next, rows from a batch entry to the next, and from a head to the
        next; None where there is no such row.
    """
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        return None
    b, h = ([(1, 0)] if x.dim() == 2 else []) + [
        (size, step) for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    steps = [step if size > 1 else 0 for size, step in (b, h)]
    row = min((step for step in steps if step), default=-(-x.shape[-1] // 4) * 4)
    if row * x.element_size() % 16 or any(step % row for step in steps):
        return None
    return row, steps[0] // row, steps[1] // row


def copyable(x: Tensor, shared: int = 0) -> bool:
    """Whether the card can copy tiles of it, if it begins where it should.

    Args:
        x: with rows in its last dimension but one.
        shared: so many first dimensions may have one entry for all.
    """
    *lead, last = x.stride()
    if last != 1 or any(step * x.element_size() % 16 for step in lead):
        return False
    spread = zip(x.shape[shared:-1], lead[shared:], strict=True)
    return all(step > 0 or size == 1 for size, step in spread)


#: why no plan of this process uses the kernel any more; empty as long as it works
_GIVEN_UP: list[str] = []


def give_up(reason: str) -> bool:
    """Serve nothing from now on; whether that is new."""
    _GIVEN_UP.append(reason)
    return len(_GIVEN_UP) == 1


def works() -> bool:
    """Whether nobody has given up."""
    return not _GIVEN_UP


@cache
def is_there(device: torch.device) -> bool:
    """Whether the card is a Hopper, and Triton one of the versions."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) in VERSIONS
