"""Factors as the kernels read them, and the way back for gradients.

Balanced, divided by the scale, rounded, and in high and low parts. Where the kernels run, one
launch after two reductions does it; elsewhere, and in a graph, whose compiler merges steps, torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .factor_launch import is_served, launch_columns, launch_gradient
from .factors import balance, balance_step, column_tops, split_columns

#: Numbers of factor columns that kernels are compiled for.
COLUMN_BUCKETS = (16, 32, 64, 128, 256)


def bucket(columns: int) -> int:
    """The smallest compiled number of columns that holds `columns`; 0 for none."""
    if columns == 0:
        return 0
    return next(b for b in COLUMN_BUCKETS if b >= columns)


def padded_columns(columns: Tensor) -> Tensor:
    """`columns` with zero columns up to a number that kernels are compiled for."""
    missing = bucket(columns.shape[-1]) - columns.shape[-1]
    if missing:
        columns = torch.nn.functional.pad(columns, (0, missing))
    return columns.contiguous()


def factor_columns(
    phi_q: Tensor,
    phi_k: Tensor,
    split: int,
    dtype: torch.dtype,
    size: float | Tensor | None,
    *,
    balanced: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both factors, padded to a compiled number of columns.

    Args:
        phi_q, phi_k: shapes (*batch, H or 1, N, R) and (*batch, H or 1, M, R), any float dtype.
        split: how many leading columns become triples: (high, high, low) parts of q, and
            (high, low, high) of k.
        dtype: what columns are rounded to, fp16 or fp32.
        size: what phi_q is divided by, fp32 (H,) if heads differ in it. None: phi_q stays fp32
            with each split column three times, and who reads it divides it and takes the parts.
        balanced: columns of both factors have like sizes as they are.
    """
    # one matrix for all heads would become one for each
    spread = isinstance(size, Tensor) and phi_q.shape[-3] != size.shape[0]
    if spread or not is_served(phi_q, phi_k):
        phi_q, phi_k = columns_by_torch(phi_q, phi_k, split, dtype, size, balanced=balanced)
        return padded_columns(phi_q), padded_columns(phi_k)
    columns = bucket(phi_q.shape[-1] + 2 * split)
    out_q = phi_q.new_empty(
        (*phi_q.shape[:-1], columns), dtype=torch.float32 if size is None else dtype
    )
    out_k = phi_k.new_empty((*phi_k.shape[:-1], columns), dtype=dtype)
    tops = () if balanced else column_tops(phi_q, phi_k)
    in_parts = size is not None
    launch_columns(phi_q, tops, split, out_q, of_keys=False, size=size, in_parts=in_parts)
    launch_columns(phi_k, tops, split, out_k, of_keys=True, size=None, in_parts=True)
    return out_q, out_k


def columns_by_torch(
    phi_q: Tensor,
    phi_k: Tensor,
    split: int,
    dtype: torch.dtype,
    size: float | Tensor | None,
    *,
    balanced: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `factor_columns` gives, without padding."""
    phi_q, phi_k = phi_q.float(), phi_k.float()
    if not balanced:
        phi_q, phi_k = balance(phi_q, phi_k)
    if size is not None:
        phi_q = phi_q / (size[:, None, None] if isinstance(size, Tensor) else size)
    packed_q, packed_k = split_columns(phi_q, phi_k, split, dtype)
    if size is None:
        repeated = phi_q[..., :split].repeat_interleave(3, -1)
        packed_q = torch.cat([repeated, phi_q[..., split:]], -1) if split else phi_q
    return packed_q, packed_k


def column_gradients(
    phi_q: Tensor, phi_k: Tensor, split: int, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of factors, from those of the columns that `factor_columns` made of them.

    Args:
        phi_q, phi_k, split: as given to `factor_columns`.
        found: "phi_q" or "phi_k" or both -> fp32 (..., COLUMNS), for its columns times `size`.

    Returns:
        fp32 (..., R) by name.
    """
    if not is_served(phi_q, phi_k, *found.values()):
        return gradients_by_torch(phi_q, phi_k, split, found)
    tops, own = column_tops(phi_q, phi_k), {}
    for name, gradient in found.items():
        own[name] = gradient.new_empty((*gradient.shape[:-1], phi_q.shape[-1]))
        launch_gradient(gradient, tops, split, own[name], of_keys=name == "phi_k")
    return own


def gradients_by_torch(
    phi_q: Tensor, phi_k: Tensor, split: int, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What `column_gradients` gives."""
    step, rank, own = balance_step(phi_q, phi_k), phi_q.shape[-1], {}
    for name, gradient in found.items():
        triples = gradient[..., : 3 * split].unflatten(-1, (split, 3))
        # of high and low parts, (h, h, l) and (h, l, h), those that meet the other factor's parts
        front = triples[..., 0] + triples[..., 1 if name == "phi_q" else 2]
        columns = torch.cat([front, gradient[..., 3 * split : 2 * split + rank]], -1)
        own[name] = columns * step if name == "phi_q" else columns / step
    return own
