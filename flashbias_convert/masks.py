"""Masks that arrive with a call: never dropped, and never assumed to be the planned ones."""

from __future__ import annotations

from torch import Tensor

from .decompose import regions
from .modules import ScoreBiasModule
from .terms import Dense, Regions, Term


def planned_mask(mask: Tensor | None) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """Exact terms for a mask that a model keeps, and warnings, for a `Description`.

    Args:
        mask: floating point, shape (nW, N, M), what the model will pass; None if it keeps none.

    Returns:
        A `Regions` term where the mask has that form. Any other mask is left to `attend_windows`,
        which adds it as it arrives, so that nothing of its size is stored.
    """
    if mask is None or not mask.any():
        return (), ()
    term = regions(mask)
    if term is not None:
        return (term,), ()
    return (), ("its mask does not separate regions; every call adds it as a dense term",)


def attend_windows(
    score_bias: ScoreBiasModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    times: int = 1,
    **kwargs: object,
) -> Tensor:
    """Attention inside windows with a site's terms and the mask of this call.

    A planned `Regions` term stands in for the mask only if the mask equals it: the values are
    compared once per mask object. Another mask is added as a dense term instead, and without a
    mask the planned one is left out. Under torch.compile only the shapes can be compared.

    Args:
        score_bias: the terms of the site.
        q, k, v: shapes (B * nW, H, N, D), (B * nW, H, M, D), (B * nW, H, M, Dv), windows
            innermost in the batch.
        mask: what the original adds to the scores, shape (nW, N, M), or None.
        times: how often it adds it.
        **kwargs: keyword arguments of `flashbias_attention`.

    Returns:
        Tensor of shape (B * nW, H, N, Dv).
    """
    if mask is None:
        return score_bias(q, k, v, without=(Regions.kind,), **kwargs)
    q, k, v = (x.unflatten(0, (-1, mask.shape[0])) for x in (q, k, v))  # (B, nW, H, N, D)
    if score_bias.mask_memo.stands_for(score_bias.planned_regions(), mask, times):
        return score_bias(q, k, v, **kwargs).flatten(0, 1)
    arrived = Dense(bias=(mask if times == 1 else times * mask).unsqueeze(-3))  # (nW, 1, N, M)
    out: Tensor = score_bias(q, k, v, extra=(arrived,), without=(Regions.kind,), **kwargs)
    return out.flatten(0, 1)
