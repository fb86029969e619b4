"""Calls in which batch entries share tiles of a dense bias, as the rows of a triangle do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .packing import GroupSpec
from .parts import MOST_QUERIES
from .strides import VECTORS, batch_strides, collapse_batch

#: of q and v: two entries of wider heads do not fit registers
WIDEST = 64
#: tensors of a call that the kernel knows
_KNOWN = {"q", "k", "v", "o", "dense"}


def is_shared(
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    *,
    plain_scale: bool,
    causal: bool,
    cosine: bool,
    bounded: bool,
) -> bool:
    """Whether `triton_shared.shared_dense_kernel` can serve a launch.

    Args:
        plain_scale: one number for all heads, and no tiny one.
        spec, tensors, causal, cosine, bounded: see `launch.launch`.
    """
    if spec.heads is not None or spec.tensors != ("dense",) or not _KNOWN.issuperset(tensors):
        return False
    q, v = tensors["q"], tensors["v"]
    if q.dtype == torch.float32 or causal or cosine or bounded or not plain_scale:
        return False
    if max(q.shape[-1], v.shape[-1]) > WIDEST or q.shape[-2] <= MOST_QUERIES:
        return False
    batch = tuple(q.shape[:-3])
    walked = [name for name in tensors if name not in VECTORS]
    sizes, strides = collapse_batch(batch, [batch_strides(n, tensors[n], batch) for n in walked])
    return bool(sizes) and sizes[-1] > 1 and strides[walked.index("dense")][-1] == 0


def programs(values: Mapping[str, Any], batch_0: int) -> int:
    """How many programs a launch has: two batch entries each, along the last dimension.

    Args:
        values: arguments of `attention_kernel` by name, as `launch` works them out.
        batch_0: size of the first batch dimension.
    """
    blocks = -(-values["N"] // values["BM"])
    return blocks * values["G"] * batch_0 * values["batch_1"] * -(-values["batch_2"] // 2)
