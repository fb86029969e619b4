"""Whether a converted file still holds the weights that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .check_terms import term_keys
from .header import require_plan, tied_of
from .read import read_checkpoint


def differing_weights(original: Mapping[str, Tensor], converted: Path) -> list[str]:
    """Names of the tensors that are not, bit for bit, in both; terms do not count.

    Args:
        original: tensors under the names of the model, in their stored dtypes.
        converted: a converted file or folder.

    Raises:
        CheckpointError: missing, damaged or not converted.
    """
    checkpoint = read_checkpoint(converted)
    plan = require_plan(checkpoint.metadata, converted)
    found = dict(checkpoint.tensors)
    tied = tied_of(checkpoint.metadata)
    found |= {alias: found[stored] for alias, stored in tied.items() if stored in found}
    terms = {key for site in plan.patched for key in term_keys(site)}
    names = [*original, *(name for name in found if name not in original and name not in terms)]
    return [name for name in names if not equal_bits(original.get(name), found.get(name))]


def equal_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; NaN equals NaN."""
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor, uint8 of shape (bytes,)."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
