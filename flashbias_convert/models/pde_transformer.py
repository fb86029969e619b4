"""A Transformer on points in space, with a learnable weight per token on squared distances.

The PDE solver of the FlashBias paper (section 4.4): eight layers of 128 channels, eight heads and
256 channels of feed-forward, whose attention adds -w[h, i] |x_i - x_j|^2 to the scores. The
weights are made from the tokens, in every layer and head anew, so that a solver serves any set of
points, as an adaptive mesh does. Distances are five exact columns of factors; nothing of size
N x N is made. Train it under autocast: coordinates, weights and factors stay fp32 there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention import flashbias_attention
from ..errors import UsageError
from ..nn import distance_factors
from ..terms import LowRank, ScoreBias


@dataclass(frozen=True)
class PDEConfig:
    """Sizes of a `PDETransformer`; the defaults are the paper's.

    Attributes:
        inputs: channels that come with each point, beside its coordinates.
        outputs: channels of the field that is predicted.
        dimensions: of space.
        layers, channels, heads, feedforward: of the Transformer; heads divide channels.
        distance: whether attention adds the weighted distances.
        widest, narrowest: the weights of the first and the last head at the start, per unit of
            squared distance; those between make a geometric series.
    """

    inputs: int = 1
    outputs: int = 1
    dimensions: int = 3
    layers: int = 8
    channels: int = 128
    heads: int = 8
    feedforward: int = 256
    distance: bool = True
    widest: float = 1.0
    narrowest: float = 256.0

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        whole = [f.name for f in dataclasses.fields(self) if f.type == "int"]
        if broken := [name for name in whole if type(sizes[name]) is not int]:
            raise UsageError(f"{broken[0]} must be an integer, got {sizes[broken[0]]!r}")
        wrong = [k for k, v in sizes.items() if type(v) is int and v < (0 if k == "inputs" else 1)]
        if wrong:
            raise UsageError(f"{wrong[0]} must be positive, got {sizes[wrong[0]]}")
        if self.channels % self.heads:
            raise UsageError(f"{self.heads} heads do not divide {self.channels} channels")
        if not (0 < self.widest < math.inf and 0 < self.narrowest < math.inf):
            raise UsageError(f"weights must be positive, got {self.widest} and {self.narrowest}")


@dataclass(frozen=True, eq=False)
class Distances:
    """What the layers share: points and their factors.

    Attributes:
        points: fp32, shape (B, N, d), centred.
        phi_q, phi_k: fp32, shape (B, 1, N, d + 2), of minus the squared distance.
    """

    points: Tensor
    phi_q: Tensor
    phi_k: Tensor

    @classmethod
    def of(cls, points: Tensor) -> Distances:
        """Centred in fp64; raises TypeError for points in half precision."""
        phi_q, phi_k = distance_factors(points, whole=True)  # weights learn
        centre = points.double().mean(-2, keepdim=True)
        return cls((points - centre).to(points.dtype), phi_q, phi_k)

    def bias(self, weight: Tensor) -> ScoreBias:
        """Terms for a weight (B, H, N)."""
        term = LowRank(phi_q=self.phi_q, phi_k=self.phi_k, row_scale=weight)
        return ScoreBias((term,), weight.shape[-2])


#: of logarithms of weights: beyond it no other point counts, or all count alike
LARGEST = 10.0

#: q, k, v (B, H, N, D), distances, weight (B, H, N) or None -> output (B, H, N, D)
Attend = Callable[[Tensor, Tensor, Tensor, Distances, Tensor | None], Tensor]


class FusedAttend:
    """The attention of this package.

    Args:
        backend, deterministic: see `flashbias_attention`.
    """

    def __init__(self, backend: str = "auto", deterministic: bool = True) -> None:
        self.backend, self.deterministic = backend, deterministic

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Tensor | None
    ) -> Tensor:
        bias = None if weight is None else distances.bias(weight)
        return flashbias_attention(
            q, k, v, bias, backend=self.backend, deterministic=self.deterministic
        )


class PointAttention(nn.Module):
    """Self-attention of N points, with a weight on distances for every token and head.

    Args:
        config: sizes.
        attend: computes softmax(q k^T / sqrt(D) - w |x_i - x_j|^2) v.
    """

    def __init__(self, config: PDEConfig, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = config.heads, attend
        self.qkv = nn.Linear(config.channels, 3 * config.channels)
        self.proj = nn.Linear(config.channels, config.channels)
        self.weight = nn.Linear(config.channels, config.heads) if config.distance else None
        if self.weight is not None:
            first, last = (math.log(w) for w in (config.widest, config.narrowest))
            nn.init.zeros_(self.weight.weight)
            with torch.no_grad():
                self.weight.bias.copy_(torch.linspace(first, last, config.heads))

    def token_weights(self, x: Tensor) -> Tensor | None:
        """(B, H, N), fp32 and positive; None without distances.

        Half precision would round a weight to eight or eleven bits, and every distance with it.
        """
        if self.weight is None:
            return None
        with torch.autocast(x.device.type, enabled=False):
            logs: Tensor = self.weight(x.to(torch.promote_types(x.dtype, torch.float32)))
        return logs.clamp(-LARGEST, LARGEST).exp().transpose(-1, -2)

    def forward(self, x: Tensor, distances: Distances) -> Tensor:
        """x and the result have shape (B, N, C)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        out = self.attend(q, k, v, distances, self.token_weights(x))
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected


class Layer(nn.Module):
    """Attention and feed-forward, with norms in front and residual connections."""

    def __init__(self, config: PDEConfig, attend: Attend) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.channels), nn.LayerNorm(config.channels)
        self.attention = PointAttention(config, attend)
        self.mlp = nn.Sequential(
            nn.Linear(config.channels, config.feedforward),
            nn.GELU(),
            nn.Linear(config.feedforward, config.channels),
        )

    def forward(self, x: Tensor, distances: Distances) -> Tensor:
        x = x + self.attention(self.norm1(x), distances)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PDETransformer(nn.Module):
    """From points and what is known there to a field at the same points.

    Args:
        config: sizes; default the paper's.
        attend: how attention is computed; default `FusedAttend`.
    """

    def __init__(self, config: PDEConfig | None = None, attend: Attend | None = None) -> None:
        super().__init__()
        self.config = config = config or PDEConfig()
        attend = attend or FusedAttend()
        self.embed = nn.Sequential(
            nn.Linear(config.dimensions + config.inputs, config.feedforward),
            nn.GELU(),
            nn.Linear(config.feedforward, config.channels),
        )
        self.layers = nn.ModuleList(Layer(config, attend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.channels)
        self.head = nn.Linear(config.channels, config.outputs)

    def forward(self, points: Tensor, values: Tensor | None = None) -> Tensor:
        """The field, shape (B, N, outputs).

        Args:
            points: fp32, shape (B, N, d); under autocast, too.
            values: shape (B, N, inputs); None if there are none.

        Raises:
            TypeError: points in half precision.
            UsageError: other dimensions, or another number of values, than it was built for;
                points of another dtype than that of its weights.
        """
        if points.dim() != 3:
            raise UsageError(f"it takes points of shape (B, N, d), got {tuple(points.shape)}")
        known = 0 if values is None else values.shape[-1]
        if (points.shape[-1], known) != (self.config.dimensions, self.config.inputs):
            raise UsageError(
                f"it takes points of {self.config.dimensions} dimensions with "
                f"{self.config.inputs} values each, got {points.shape[-1]} with {known}"
            )
        distances = Distances.of(points)
        seen, own = distances.points, self.head.weight.dtype
        if own != seen.dtype and not torch.is_autocast_enabled(points.device.type):
            raise UsageError(
                f"its weights are {own} and the points {seen.dtype}",
                "keep both in one dtype, and train in half precision under autocast",
            )
        x = self.embed(seen if values is None else torch.cat([seen, values.to(seen.dtype)], -1))
        for layer in self.layers:
            x = layer(x, distances)
        out: Tensor = self.head(self.norm(x))
        return out

    def use(self, attend: Attend) -> None:
        """Let something else compute the attention of all layers."""
        for module in self.modules():
            if isinstance(module, PointAttention):
                module.attend = attend


def relative_error(found: Tensor, truth: Tensor) -> Tensor:
    """Relative L2 error of each field of a batch, (B, N, outputs) -> (B,)."""
    wrong = (found.float() - truth).flatten(1).norm(dim=1)
    return wrong / truth.flatten(1).norm(dim=1)


__all__ = [
    "Attend",
    "Distances",
    "FusedAttend",
    "PDEConfig",
    "PDETransformer",
    "PointAttention",
    "relative_error",
]
