"""Which launches the Hopper kernel serves; nothing here imports Triton's compiler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ..packing import GroupSpec

#: versions of Triton, whose Gluon the kernel was tested with on a card
VERSIONS = ((3, 6),)
CAPABILITY = (9, 0)
#: by head size: padded columns of factors that fit the memory of a multiprocessor
COLUMNS = {64: (0, 16, 32, 64, 128), 128: (0, 16, 32, 64)}
#: by head size: fewest tokens from which on it was faster, see scripts/results/tune_hopper.csv
SHORTEST = {64: 1536, 128: 512}
#: fewest scores of a call: with less the host takes longer to describe tensors than the card works
FEWEST_SCORES = 2**28
#: fp16 has no range for quick steps; without them it was measured to pay with heads of this size
FP16_FROM = 128
#: queries of a warpgroup, and of a program, which has two
ROWS, BLOCK_M = 64, 128
#: most blocks of queries that a multiprocessor may have to look at in the second pass
MARKS = 2048
_KNOWN = {"q", "k", "v", "o", "phi_q", "phi_k"}


def serves(
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    *,
    plain_scale: bool,
    causal: bool,
    cosine: bool,
    bounded: bool,
) -> bool:
    """Whether the kernel can serve a launch, and is worth it.

    Args:
        plain_scale: one number for all heads, positive and no tiny one.
        spec, tensors, causal, cosine, bounded: see `launch.launch`.
    """
    if spec.heads is not None or not _KNOWN.issuperset(tensors):
        return False
    if causal or cosine or bounded or not plain_scale or (spec.columns and not spec.scaled):
        return False
    q = tensors["q"]
    n, d = q.shape[-2:]
    if q.dim() not in (3, 4) or spec.columns not in COLUMNS.get(d, ()) or n < SHORTEST[d]:
        return False
    if n * n * (q.numel() // (n * d)) < FEWEST_SCORES:
        return False
    if q.dtype != torch.bfloat16 and (q.dtype != torch.float16 or d < FP16_FROM):
        return False
    if any(tensors[name].shape != q.shape for name in ("k", "v", "o")):
        return False
    factors = [x for name, x in tensors.items() if name.startswith("phi")]
    if any(x.dim() not in (3, 4) or x.dtype != torch.float16 for x in factors):
        return False
    own = [copyable(x, shared=x.dim() - 2 if name.startswith("phi") else 0)
           for name, x in tensors.items()]  # fmt: skip
    return all(own) and not _GIVEN_UP and is_there(q.device)


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
