"""What factor networks learn from, and how far they are off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DecompositionError, UsageError
from ..terms import LowRank
from .factor_networks import FactorNetworks
from .loss import Loss, measure, row_center
from .neural_options import FitLoss


@dataclass(frozen=True, eq=False)
class Sample:
    """Tokens and the bias between them; no masks: tokens that do not count are left out.

    Attributes:
        x_q: features of the queries, floating point, shape (*batch, N, C).
        x_k: features of the keys, shape (*batch, M, C').
        bias: shape (*batch, H, N, M).
        q, k, v: what attends with that bias, shapes (*batch or more, H, N, D) and so on; None
            where only the bias is known.
        scale: of the scores.
    """

    x_q: Tensor
    x_k: Tensor
    bias: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    scale: float = 1.0

    def to(self, device: torch.device) -> Sample:
        """A copy on `device`, all in fp32."""
        tensors = {
            name: value.detach().to(device, torch.float32)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return Sample(**tensors, scale=self.scale)

    def check(self, heads: int) -> None:
        """Raise UsageError for shapes that do not fit, DecompositionError for NaN or infinity."""
        n, m = self.x_q.shape[-2], self.x_k.shape[-2]
        wanted = (*self.x_q.shape[:-2], heads, n, m)
        if tuple(self.bias.shape) != wanted:
            raise UsageError(
                f"the bias of these tokens must have shape {wanted}, got {tuple(self.bias.shape)}"
            )
        for name, tensor in (("bias", self.bias), ("x_q", self.x_q), ("x_k", self.x_k)):
            if not bool(tensor.isfinite().all()):
                raise DecompositionError(f"{name} of a sample holds NaN or infinity")


#: makes one sample; everything random comes from the generator
Draw = Callable[[torch.Generator], Sample]


def squared_error(networks: FactorNetworks, sample: Sample, loss: FitLoss) -> Tensor:
    """Mean squared error of every head, shape (H,); differentiable. See `FitOptions.loss`."""
    phi_q, phi_k = networks.factors(sample.x_q, sample.x_k)
    if loss == "attention":
        made = phi_q @ phi_k.mT
        error = attend(sample, made) - attend(sample, sample.bias)
        return _by_head(error)
    if loss == "raw":
        return _by_head(phi_q @ phi_k.mT - sample.bias)
    # centring the rows of the product is centring the columns of phi_k
    phi_k = phi_k - phi_k.mean(-2, keepdim=True)
    return _by_head(phi_q @ phi_k.mT - row_center(sample.bias))


def squared_size(sample: Sample, loss: FitLoss) -> Tensor:
    """Mean square of what `squared_error` approximates, shape (H,)."""
    if loss == "attention":
        return _by_head(attend(sample, sample.bias))
    return _by_head(sample.bias if loss == "raw" else row_center(sample.bias))


def attend(sample: Sample, bias: Tensor) -> Tensor:
    """What attention puts out with a bias; its weights where a sample has no q, k and v.

    Shape (*batch, H, N, Dv) or (*batch, H, N, M).
    """
    if sample.q is None or sample.k is None or sample.v is None:
        return torch.softmax(bias, -1)
    scores = sample.scale * (sample.q @ sample.k.mT) + bias
    return torch.softmax(scores, -1) @ sample.v


def _by_head(x: Tensor) -> Tensor:
    """Mean square over everything but the heads."""
    others = [d for d in range(x.dim()) if d != x.dim() - 3]
    return x.square().mean(others)


@torch.no_grad()
def evaluate(networks: FactorNetworks, samples: Sequence[Sample]) -> Loss:
    """What the networks lose, the worst sample of each head: shapes (H,)."""
    losses = []
    for sample in samples:
        phi_q, phi_k = networks.factors(sample.x_q, sample.x_k)
        found = measure(sample.bias, LowRank(phi_q=phi_q, phi_k=phi_k))
        losses.append(found.worst_over_batch())
    stacked = {k: torch.stack([getattr(x, k) for x in losses]) for k in vars(losses[0])}
    return Loss(**stacked).worst_over_batch()


@torch.no_grad()
def mean_loss(
    networks: FactorNetworks, samples: Sequence[Sample], loss: FitLoss, size: Tensor
) -> float:
    """Squared error relative to `size`, mean over heads and samples."""
    errors = torch.stack([squared_error(networks, sample, loss) for sample in samples])
    return float((errors.double().mean(0) / size).mean())
