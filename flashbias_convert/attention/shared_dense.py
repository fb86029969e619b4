"""Calls in which batch entries share tiles of a dense bias, as the rows of a triangle do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .packing import GroupSpec
from .parts import MOST_QUERIES

#: of q and v: two entries of wider heads do not fit registers
WIDEST = 64
#: tensors of a call that the kernel knows
_KNOWN = {"q", "k", "v", "o", "dense", "key_mask", "gate"}


def is_shared(spec: GroupSpec, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> bool:
    """Whether `triton_shared.shared_dense_kernel` serves a launch.

    Args:
        spec, tensors: the group, see `launch.launch`.
        values: arguments of `attention_kernel` by name, as `launch` works them out.
    """
    if spec.heads is not None or spec.tensors != ("dense",) or not _KNOWN.issuperset(tensors):
        return False
    flags = {name: values[name] for name in ("NATURAL", "CAUSAL", "COSINE", "BOUNDED")}
    if any(flags.values()) or not values["PLAIN_SCALE"] or values["parts"] is not None:
        return False
    if max(values["D"], values["DV"]) > WIDEST or values["N"] <= MOST_QUERIES:
        return False
    return values["batch_2"] > 1 and values["dense_strides"][2] == 0


def programs(values: Mapping[str, Any], batch_0: int) -> int:
    """How many programs a launch has: two batch entries each, along the last dimension."""
    blocks = -(-values["N"] // values["BM"])
    return blocks * values["G"] * batch_0 * values["batch_1"] * -(-values["batch_2"] // 2)
