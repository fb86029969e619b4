"""One attention call in one layout: (batch, H, N, M), whatever the model's own is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .fused import FusedCall
from .layout import Layout
from .operations import MASKED_BELOW
from .scores import Scores, lean

#: more numbers of a bias than this are not kept, if its batch can be shortened: 512 MiB of fp32
KEPT_NUMBERS = 2**27
#: rounding errors that a few additions and products of scores may add up to, in units of eps
ROUNDINGS = 16.0


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one call added to its scores.

    Attributes:
        seen: "sdpa" or "softmax".
        batch, heads, n, m, head_dim: B, H, N, M, D of the call; B counts windows, too.
        scale: one number, or one per head.
        cosine: whether all rows of q and k have one length.
        addends: shapes (b, H or 1, N or 1, M or 1), 1 where they only repeat themselves. Their
            batch is 1 or a divisor of B: the whole batch is a repetition of it, as of windows.
        hidden: bool of such a shape, cells that a mask has overwritten; None if none has.
        q, k: shapes (B, H, N, D) and (B, H, M, D); None where their order is not known.
        unknown: operations between product and softmax that are no part of attention with a bias.
        causal: SDPA was asked to be causal.
        key_heads: fewer than `heads` for grouped queries.
    """

    seen: str
    batch: int
    heads: int
    n: int
    m: int
    head_dim: int
    scale: float | tuple[float, ...]
    addends: tuple[Tensor, ...]
    hidden: Tensor | None = None
    cosine: bool = False
    q: Tensor | None = None
    k: Tensor | None = None
    unknown: tuple[str, ...] = ()
    causal: bool = False
    key_heads: int = 0

    def shortened(self) -> AttentionCall:
        """With the first entries of the batch only, if it is too large to keep."""
        largest = max((a.numel() for a in self.addends), default=0)
        keep = self.batch * KEPT_NUMBERS // max(largest, 1)
        if keep >= self.batch:
            return self
        parts = [a.shape[0] for a in (*self.addends, self.hidden) if a is not None]
        period = max((p for p in parts if p < self.batch), default=1)
        keep = max(keep // period, 1) * period

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:keep].clone()

        addends = tuple(a for a in map(cut, self.addends) if a is not None)
        return replace(
            self, batch=keep, addends=addends,
            hidden=cut(self.hidden), q=cut(self.q), k=cut(self.k),
        )  # fmt: skip


# -- from what was seen ----------------------------------------------------------------------


def of_fused(call: FusedCall, module: nn.Module, samples: int) -> AttentionCall:
    """A call of SDPA: its mask is all there is."""
    layout = Layout(call.q.shape[:-2], module, samples)
    n, m, d = call.q.shape[-2], call.k.shape[-2], call.q.shape[-1]
    addends, hidden = [], None
    if call.mask is not None and call.mask.dtype == torch.bool:
        hidden = layout.bring(lean(~call.mask))
    elif call.mask is not None:
        addends = [_kept(layout.bring(lean(call.mask)))]
    if call.causal:
        later = torch.ones(n, m, dtype=torch.bool, device=call.q.device).triu(1)
        hidden = later[None, None] if hidden is None else hidden | later
    scale = d**-0.5 if call.scale is None else call.scale
    k_lead = call.k.shape[:-2]
    grouped = len(k_lead) > 0 and k_lead[-1] != call.q.shape[:-2][-1]
    return AttentionCall(
        "sdpa", layout.batch, layout.heads, n, m, d,
        scale=scale * call.factor,
        addends=tuple(addends),
        hidden=hidden,
        cosine=_is_cosine(call.q, call.k),
        q=_kept(layout.bring(call.q)),
        k=None if grouped else _kept(layout.bring(call.k)),
        causal=call.causal,
        key_heads=int(k_lead[-1]) if grouped else layout.heads,
    )  # fmt: skip


def of_scores(
    scores: Scores, actual: Tensor, dim: int, module: nn.Module, samples: int
) -> AttentionCall:
    """A softmax over scores that were followed from their product."""
    if dim % actual.dim() == actual.dim() - 2:
        scores = scores.reshaped(lambda part: part.mT, permuted=True)
        actual = actual.mT
    scores = _complete(scores, actual)
    alike = bool(scores.addends) and all(lean(a).shape[:-2].numel() == 1 for a in scores.addends)
    layout = Layout(scores.shape[:-2], module, samples, alike)
    n, m = scores.shape[-2:]
    source = scores.source
    known = not scores.permuted and tuple(source.q.shape[-2:-1]) == (n,)
    known = known and source.q.shape[:-2].numel() == math.prod(layout.lead)
    q, k = (
        (_kept(layout.bring(t.reshape(*layout.lead, *t.shape[-2:]))) for t in (source.q, source.k))
        if known
        else (None, None)
    )
    return AttentionCall(
        "softmax", layout.batch, layout.heads, n, m, int(source.q.shape[-1]),
        scale=_scale(layout.bring(lean(scores.scale)) * source.factor, layout.heads),
        addends=tuple(_kept(layout.bring(lean(a))) for a in scores.addends),
        hidden=None if scores.hidden is None else layout.bring(lean(scores.hidden)),
        cosine=_is_cosine(source.q, source.k),
        q=q,
        k=k,
        unknown=scores.unknown,
        key_heads=layout.heads,
    )  # fmt: skip


def _complete(scores: Scores, actual: Tensor) -> Scores:
    """Scores with whatever the followed operations do not explain as one more addend."""
    terms = [lean(scores.scale).to(scores.product.dtype) * scores.product]
    terms += [lean(a) for a in scores.addends]
    shown = max(float(t.masked_fill(_is_far(t), 0).abs().amax()) for t in terms)
    total = sum(terms[1:], terms[0])
    wrong = actual - total
    masked = _is_far(total) | _is_far(actual)
    if scores.hidden is not None:
        masked = masked | scores.hidden
    wrong = wrong.masked_fill(masked, 0)
    # a product may have been made wider after it was rounded
    eps = max(torch.finfo(t.dtype).eps for t in (actual, scores.product))
    if bool(wrong.abs().max() <= ROUNDINGS * eps * shown):
        return replace(scores, unknown=())
    unknown = scores.unknown or ("an operation that was not seen",)
    return replace(scores, addends=(*scores.addends, wrong), unknown=unknown)


def _is_far(values: Tensor) -> Tensor:
    """Where nothing is attended to; the sum of two such values may have no sign, or no value."""
    return (values.abs() >= -MASKED_BELOW) | ~values.isfinite()


def _scale(scale: Tensor, heads: int) -> float | tuple[float, ...]:
    """One number, or one per head; NaN where it differs otherwise."""
    if scale.numel() == 1:
        return float(scale)
    if tuple(scale.shape) == (1, heads, 1, 1):
        return tuple(scale.flatten().tolist())
    return float(scale.flatten()[0]) if bool((scale == scale.flatten()[0]).all()) else math.nan


def _is_cosine(q: Tensor, k: Tensor) -> bool:
    """Whether every row of both has length one, up to rounding."""
    for side in (q, k):
        lengths = side.double().norm(dim=-1)
        allowed = ROUNDINGS * torch.finfo(side.dtype).eps
        if not side.numel() or not bool(((lengths - 1).abs() <= allowed).all()):
            return False
    return True


def _kept(tensor: Tensor) -> Tensor:
    """A copy that nothing changes later."""
    return tensor.detach().clone()
