"""What an approximation of a bias loses, in terms that softmax cannot ignore.

Softmax does not see anything that is constant along a row, so every number here is taken after
row-centring: on trained models the share of *raw* energy says little about accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..terms import LowRank
from .chunks import chunks


@dataclass(frozen=True, eq=False)
class Loss:
    """What was lost, one number per matrix: float64 tensors of shape (*batch, H).

    Attributes:
        energy: kept share of squared singular values of the row-centred bias, in [0, 1]; 1 for
            a bias that is constant along rows if the approximation is, too.
        logit_error_max: largest |b - b_hat| after row-centring.
        logit_error_rms: root mean square of the same.
        attention_error: total variation distance between softmax(b) and softmax(b_hat), mean
            over rows, in [0, 1].
    """

    energy: Tensor
    logit_error_max: Tensor
    logit_error_rms: Tensor
    attention_error: Tensor

    def worst_over_batch(self) -> Loss:
        """One number per head, shape (H,): the worst entry of the batch decides."""
        heads = self.energy.shape[-1]
        flat = {name: value.reshape(-1, heads) for name, value in vars(self).items()}
        worst = {name: value.amax(0) for name, value in flat.items()}
        return Loss(**{**worst, "energy": flat["energy"].amin(0)})


def row_center(bias: Tensor, visible: Tensor | None = None) -> Tensor:
    """Subtract from each row its mean over the visible keys.

    Args:
        bias: floating point, shape (..., N, M). Half precision is upcast to float64 by callers
            that need it; here the dtype stays.
        visible: bool, shape (N, M), True where a query attends to a key; None means everywhere.
            A row that sees no key stays as it is.

    Returns:
        Tensor like `bias`. A row that is constant over its visible keys becomes exactly zero
        there, because the row's largest entry is subtracted before the mean is taken.
    """
    if visible is None:
        shifted = bias - bias.amax(-1, keepdim=True)
        return shifted - shifted.mean(-1, keepdim=True)
    visible = visible.to(bias.device)
    sees_any = visible.any(-1, keepdim=True)
    top = bias.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    shifted = bias - top.where(sees_any, torch.zeros_like(top))
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    return shifted - shifted.masked_fill(~visible, 0).sum(-1, keepdim=True) / count


@torch.no_grad()
def measure(
    bias: Tensor,
    approximation: Tensor | LowRank,
    visible: Tensor | None = None,
    *,
    diagonal: Tensor | None = None,
) -> Loss:
    """Compare a bias with its approximation, in float64, a few matrices at a time.

    Args:
        bias: floating point, shape (*batch, H, N, M).
        approximation: a tensor that broadcasts to the shape of `bias`, or the factors of all of
            its heads, which are multiplied chunk by chunk.
        visible: bool, shape (N, M), True where a query attends to a key. Hidden cells count for
            nothing, and a row that sees no key has no say.
        diagonal: added to an approximation by factors, shape (*batch, H, N).

    Returns:
        One number per matrix; see `Loss`. Never NaN for finite input.
    """
    lead, (n, m) = bias.shape[:-2], bias.shape[-2:]
    flat = bias.reshape(-1, n, m)
    approximate = _slices(approximation, bias, diagonal)
    parts = [
        _measure(flat[part].double(), approximate(part), visible)
        for part in chunks(len(flat), n * m, bias.device)
    ]
    names = ("energy", "logit_error_max", "logit_error_rms", "attention_error")
    columns = {k: torch.cat([p[k] for p in parts]).reshape(lead) for k in names}
    return Loss(**columns)


def _slices(
    approximation: Tensor | LowRank, bias: Tensor, diagonal: Tensor | None
) -> Callable[[slice], Tensor]:
    """A function from a slice of flattened matrices to their approximation, float64."""
    if isinstance(approximation, Tensor):
        dense = approximation.expand(bias.shape).reshape(-1, *bias.shape[-2:])
        return lambda part: dense[part].double()
    rank, lead = approximation.max_rank, bias.shape[:-2]
    phi_q = approximation.phi_q.expand(*lead, bias.shape[-2], rank).flatten(0, -3)
    phi_k = approximation.phi_k.expand(*lead, bias.shape[-1], rank).flatten(0, -3)
    own = None if diagonal is None else diagonal.expand(bias.shape[:-1]).flatten(0, -2)

    def multiply(part: slice) -> Tensor:
        product = phi_q[part].double() @ phi_k[part].double().mT
        if own is not None:
            product.diagonal(dim1=-2, dim2=-1).add_(own[part])
        return product

    return multiply


def _measure(bias: Tensor, approximation: Tensor, visible: Tensor | None) -> dict[str, Tensor]:
    """The numbers of `Loss` for float64 matrices of shape (K, N, M)."""
    error = row_center(bias - approximation, visible)
    centred = row_center(bias, visible)
    cells: Tensor | int = bias.shape[-2] * bias.shape[-1]
    if visible is not None:
        visible = visible.to(bias.device)
        error, centred = error.masked_fill(~visible, 0), centred.masked_fill(~visible, 0)
        cells = visible.sum().clamp(min=1)
    lost, total = error.square().sum((-2, -1)), centred.square().sum((-2, -1))
    return {
        "energy": _kept(lost, total),
        "logit_error_max": error.abs().amax((-2, -1)),
        "logit_error_rms": (lost / cells).sqrt(),
        "attention_error": _total_variation(bias, approximation, visible),
    }


def _kept(lost: Tensor, total: Tensor) -> Tensor:
    """1 - lost / total, where 0 / 0 means that nothing was lost."""
    nothing = torch.where(lost > 0, torch.zeros_like(lost), torch.ones_like(lost))
    share = 1 - lost / total.where(total > 0, torch.ones_like(total))
    return torch.where(total > 0, share.clamp(0, 1), nothing)


def _total_variation(bias: Tensor, other: Tensor, visible: Tensor | None) -> Tensor:
    """Mean over rows of the distance between the two softmaxes, shape (K,)."""
    if visible is None:
        return (_softmax(bias) - _softmax(other)).abs().sum(-1).mean(-1) / 2
    rows = visible.any(-1)
    hidden = ~visible[rows]
    if not len(hidden):
        return bias.new_zeros(len(bias))
    p, q = (x[:, rows].masked_fill(hidden, float("-inf")) for x in (bias, other))
    return (_softmax(p) - _softmax(q)).abs().sum(-1).mean(-1) / 2


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)
