"""From a bias to what the kernels read when gradients are wanted.

Rounding to half precision would round gradients, too. So the tensors that reach the operator stay
as they are, and factors are rounded inside it, by `rounded`; `factor_gradients` is the way back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from ..terms import Alibi, Axial, Diagonal, LowRank, ScoreBias, Term
from .factor_columns import bucket, column_gradients, columns_by_name, readable
from .factors import column_tops
from .packing import (
    GroupSpec,
    PackedBias,
    first_fields,
    for_kernel,
    head_groups,
    heads_of,
    leading_columns,
    pack_term,
    side_by_side,
    spec_fields,
    splits,
)

#: Largest entries of the columns of factors: forward and backward pass balance by them, which no
#: gradient goes through.
TOPS = ("top_q", "top_k")


def training_columns(bias: ScoreBias, *, half: bool) -> int:
    """Padded factor columns of a group that has all terms and heads."""
    thin = [term for term in bias.terms if isinstance(term, LowRank)]
    return bucket(sum(term.max_rank + 2 * splits(term, half) for term in thin))


def pack_for_training(bias: ScoreBias, *, half: bool) -> PackedBias:
    """Prepare a bias for the operator that gives gradients. Differentiable.

    Args:
        bias: the terms.
        half: whether q, k and v are in half precision.

    Returns:
        Tensors by group of heads as in `pack`, but `phi_q` and `phi_k` of a group are not rounded,
        with the columns in front that are to be split; `top_q` and `top_k` are their `column_tops`.
    """
    # in half precision axial terms are factors where those fit, in fp16: eight times finer than
    # bf16, which such calls round a bias to
    bias = for_kernel(bias.with_one_dense(), half=half, rounded=True)
    specs, flat = [], []
    for heads in head_groups(bias, half=half):
        spec, tensors = _pack_group(bias, heads, half)
        specs.append(spec)
        flat += tensors
    return PackedBias(tuple(specs), flat)


def _pack_group(
    bias: ScoreBias, heads: tuple[int, ...], half: bool
) -> tuple[GroupSpec, list[Tensor]]:
    chosen, tensors = heads_of(bias, heads)
    spec = first_fields(heads if tensors else None)
    thin = [t for t in chosen.terms if isinstance(t, LowRank) and t.largest_rank > 0]
    if thin:
        count, tensors["phi_q"], tensors["phi_k"] = _columns(thin, half)
        spec |= {"columns": tensors["phi_q"].shape[-1], "split": count}
        tops = column_tops(tensors["phi_q"], tensors["phi_k"])
        tensors |= dict(zip(TOPS, tops, strict=True))
    for term in chosen.terms:
        if not isinstance(term, LowRank):
            spec |= spec_fields(term)
            tensors |= pack_term(_without_gate(term))
    return GroupSpec(**spec, tensors=tuple(tensors)), list(tensors.values())


def _columns(terms: list[LowRank], half: bool) -> tuple[int, Tensor, Tensor]:
    """Number of columns to split, and phi_q and phi_k with those columns in front."""
    if len(terms) == 1:
        count, phi_q, phi_k = leading_columns(terms[0], half)
        return count, readable(phi_q), readable(phi_k)
    front: list[tuple[Tensor, Tensor]] = []
    back: list[tuple[Tensor, Tensor]] = []
    for term in terms:
        count, phi_q, phi_k = leading_columns(term, half)
        phi_q, phi_k = readable(phi_q), readable(phi_k)
        front.append((phi_q[..., :count], phi_k[..., :count]))
        back.append((phi_q[..., count:], phi_k[..., count:]))
    phi_q, phi_k = (side_by_side([pair[i] for pair in front + back]) for i in (0, 1))
    return sum(pair[0].shape[-1] for pair in front), phi_q, phi_k


def _without_gate(term: Term) -> Term:
    """A term whose gate is multiplied into its tensors, where that needs no larger ones.

    Slopes that ask for a gradient become a gate on distances: the kernel sums those by row.
    """
    rows = term.row_scale
    if isinstance(term, Alibi):
        learned = term.slopes.requires_grad or (rows is not None and rows.requires_grad)
        if not learned:
            return term
        gate = term.slopes[..., None] if rows is None else term.slopes[..., None] * rows
        return dataclasses.replace(
            term, slopes=torch.ones_like(gate[..., 0].detach()), row_scale=gate
        )
    if rows is None:
        return term
    if isinstance(term, Diagonal):
        return dataclasses.replace(term, values=term.values * rows, row_scale=None)
    if isinstance(term, Axial):
        rel_h, rel_w = (rel.float() * rows.float()[..., None] for rel in (term.rel_h, term.rel_w))
        return dataclasses.replace(term, rel_h=rel_h, rel_w=rel_w, row_scale=None)
    return term


def rounded(
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    *,
    half: bool,
    scale: float,
    head_scale: Tensor | None,
    again: Mapping[str, torch.dtype] | None = None,
) -> tuple[GroupSpec, dict[str, Tensor]]:
    """The group as the kernels read it, with factors rounded and divided by the scale's size.

    Args:
        spec, tensors: one group, from `pack_for_training`.
        half: whether factors are rounded to fp16.
        scale: the scale of q k, unless heads differ in it.
        head_scale: fp32 (H,), the scale of each head.
        again: factors that are wanted in another dtype, too; see `columns_by_name`.
    """
    own = {name: t for name, t in tensors.items() if name not in TOPS}
    if spec.columns == 0:
        return spec, own
    dtype, names = torch.float16 if half else torch.float32, tuple(own)
    own |= columns_by_name(
        own["phi_q"], own["phi_k"], (tensors["top_q"], tensors["top_k"]), spec.split, dtype,
        _scale(scale, head_scale, own.get("heads")) if half else None, again,
    )  # fmt: skip
    columns = own["phi_q"].shape[-1]
    return dataclasses.replace(spec, columns=columns, scaled=True, tensors=names), own


def _scale(scale: float, head_scale: Tensor | None, heads: Tensor | None) -> Tensor | float:
    if head_scale is None:
        return scale
    return head_scale if heads is None else head_scale.index_select(0, heads)


def factor_gradients(
    spec: GroupSpec, tensors: Mapping[str, Tensor], found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of `phi_q` and `phi_k` as packed for training, from those of rounded columns.

    Args:
        spec, tensors: one group, from `pack_for_training`.
        found: gradients by name; those of factors have the columns of `rounded`, (..., COLUMNS).
    """
    factors = {name: t for name, t in found.items() if name in ("phi_q", "phi_k")}
    if not factors:
        return found
    tops = (tensors["top_q"], tensors["top_k"])
    return found | column_gradients(tensors["phi_q"], tensors["phi_k"], spec.split, factors, tops)
