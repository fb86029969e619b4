"""Factors as the kernels read them, and the way back for gradients.

Balanced, divided by the scale, rounded, and in high and low parts. Where the kernels run, one
launch after two reductions does it; elsewhere, and in a graph, whose compiler merges steps, torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .factor_launch import is_served, launch_columns, launch_gradients
from .factors import balance, balance_step, column_tops, scale_size, scale_sizes, split_columns

#: Numbers of factor columns that kernels are compiled for.
COLUMN_BUCKETS = (16, 32, 64, 128, 256)

#: What kernels call columns that are written in another dtype, too.
_KEPT_AS = {"phi_q": "again_q", "phi_k": "again_k"}

#: Largest entries of both factors, see `column_tops`; none for factors that are balanced.
Tops = tuple[Tensor, Tensor] | tuple[()]


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


def readable(phi: Tensor) -> Tensor:
    """`phi` as it is, or in fp32 where the kernels do not read its dtype."""
    return phi.float() if phi.dtype == torch.float64 else phi


def factor_columns(
    phi_q: Tensor,
    phi_k: Tensor,
    split: int,
    dtype: torch.dtype,
    scale: float | Tensor | None,
    *,
    balanced: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both factors, padded to a compiled number of columns.

    Args:
        phi_q, phi_k: shapes (*batch, H or 1, N, R) and (*batch, H or 1, M, R), any float dtype.
        split: how many leading columns become triples: (high, high, low) parts of q, and
            (high, low, high) of k.
        dtype: what columns are rounded to, fp16 or fp32.
        scale: phi_q is divided by its size, see `scale_size`; fp32 (H,) if heads differ in it.
            None: phi_q stays fp32 with each split column three times, and who reads it divides it
            and takes the parts.
        balanced: columns of both factors have like sizes as they are.
    """
    phi_q, phi_k = readable(phi_q), readable(phi_k)
    tops = () if balanced else column_tops(phi_q, phi_k)
    made = columns_by_name(phi_q, phi_k, tops, split, dtype, scale)
    return made["phi_q"], made["phi_k"]


def columns_by_name(
    phi_q: Tensor,
    phi_k: Tensor,
    tops: Tops,
    split: int,
    dtype: torch.dtype,
    scale: float | Tensor | None,
    again: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Tensor]:
    """What `factor_columns` gives, as "phi_q" and "phi_k".

    Args:
        phi_q, phi_k, split, dtype, scale: see there; no fp64.
        tops: of the factors.
        again: "phi_q" or "phi_k" or both -> another dtype in which its columns are wanted as well,
            by the same launch: as "phi_q_rounded" and "phi_k_rounded", with parts of their own.
            Only with a scale.
    """
    again = again or {}
    assert scale is not None or not again
    # one matrix for all heads would become one for each
    spread = isinstance(scale, Tensor) and phi_q.shape[-3] != scale.shape[0]
    if spread or not is_served(phi_q, phi_k):
        return _by_torch(phi_q, phi_k, tops, split, dtype, scale, again)
    width = bucket(phi_q.shape[-1] + 2 * split)
    shapes = {"q": (*phi_q.shape[:-1], width), "k": (*phi_k.shape[:-1], width)}
    kinds = {"out_q": torch.float32 if scale is None else dtype, "out_k": dtype}
    kinds |= {_KEPT_AS[name]: other for name, other in again.items()}
    outs = {name: phi_q.new_empty(shapes[name[-1]], dtype=kind) for name, kind in kinds.items()}
    launch_columns((phi_q, phi_k), tops, split, outs, scale=scale)
    made = {"phi_q": outs["out_q"], "phi_k": outs["out_k"]}
    return made | {f"{name}_rounded": outs[_KEPT_AS[name]] for name in again}


def _by_torch(
    phi_q: Tensor,
    phi_k: Tensor,
    tops: Tops,
    split: int,
    dtype: torch.dtype,
    scale: float | Tensor | None,
    again: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """What `columns_by_name` gives."""
    scaled = _scaled(phi_q, phi_k, tops, scale)
    packed = _in_columns(*scaled, split, dtype, whole=scale is None)
    made = {name: padded_columns(t) for name, t in zip(("phi_q", "phi_k"), packed, strict=True)}
    for name, other in again.items():
        own = split_columns(*scaled, split, other)[name == "phi_k"]
        made[f"{name}_rounded"] = padded_columns(own)
    return made


def columns_by_torch(
    phi_q: Tensor,
    phi_k: Tensor,
    split: int,
    dtype: torch.dtype,
    scale: float | Tensor | None,
    *,
    balanced: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `factor_columns` gives, without padding."""
    phi_q, phi_k = readable(phi_q), readable(phi_k)
    tops = () if balanced else column_tops(phi_q, phi_k)
    scaled = _scaled(phi_q, phi_k, tops, scale)
    return _in_columns(*scaled, split, dtype, whole=scale is None)


def _scaled(
    phi_q: Tensor, phi_k: Tensor, tops: Tops, scale: float | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both factors in fp32, balanced and divided by the size of the scale."""
    phi_q, phi_k = phi_q.float(), phi_k.float()
    if tops:
        phi_q, phi_k = balance(phi_q, phi_k, tops)
    if isinstance(scale, Tensor):
        phi_q = phi_q / scale_sizes(scale)[:, None, None]
    elif scale is not None:
        phi_q = phi_q / scale_size(scale)
    return phi_q, phi_k


def _in_columns(
    phi_q: Tensor, phi_k: Tensor, split: int, dtype: torch.dtype, *, whole: bool
) -> tuple[Tensor, Tensor]:
    """Rounded, the first ones in three; with `whole` phi_q is neither rounded nor in parts."""
    packed_q, packed_k = split_columns(phi_q, phi_k, split, dtype)
    if whole:
        repeated = phi_q[..., :split].repeat_interleave(3, -1)
        packed_q = torch.cat([repeated, phi_q[..., split:]], -1) if split else phi_q
    return packed_q, packed_k


def column_gradients(
    phi_q: Tensor,
    phi_k: Tensor,
    split: int,
    found: dict[str, Tensor],
    tops: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Gradients of factors, from those of the columns that `factor_columns` made of them.

    Args:
        phi_q, phi_k, split: as given to `factor_columns`.
        found: "phi_q" or "phi_k" or both -> fp32 (..., COLUMNS), for its columns times the size of
            the scale.
        tops: of the factors, if somebody has them already.

    Returns:
        By name, (..., R) in the dtype of the factor.
    """
    tops = tops or column_tops(phi_q, phi_k)
    if not is_served(phi_q, phi_k, *found.values()):
        return gradients_by_torch(phi_q, phi_k, split, found, tops)
    given, outs, rank = {}, {}, phi_q.shape[-1]
    for name, phi in (("phi_q", phi_q), ("phi_k", phi_k)):
        if name in found:
            end, gradient = name[-1], found[name]
            given[f"found_{end}"] = gradient
            outs[f"out_{end}"] = gradient.new_empty((*gradient.shape[:-1], rank), dtype=phi.dtype)
    launch_gradients(given, tops, split, outs)
    return {name: outs[f"out_{name[-1]}"] for name in found}


def gradients_by_torch(
    phi_q: Tensor,
    phi_k: Tensor,
    split: int,
    found: dict[str, Tensor],
    tops: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """What `column_gradients` gives."""
    step = balance_step(*(tops or column_tops(phi_q, phi_k)))
    rank, own = phi_q.shape[-1], {}
    for name, gradient in found.items():
        triples = gradient[..., : 3 * split].unflatten(-1, (split, 3))
        # of high and low parts, (h, h, l) and (h, l, h), those that meet the other factor's parts
        front = triples[..., 0] + triples[..., 1 if name == "phi_q" else 2]
        columns = torch.cat([front, gradient[..., 3 * split : 2 * split + rank]], -1)
        columns = columns * step if name == "phi_q" else columns / step
        own[name] = columns.to((phi_q, phi_k)[name == "phi_k"].dtype)
    return own
