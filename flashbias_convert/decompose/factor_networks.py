"""Networks that make the factors of a bias from features of the tokens (FlashBias, section 3.2).

A bias that depends on the input has no fixed factors, but often fixed functions that make them:
b[i, j] = phi_q(x_q[i]) . phi_k(x_k[j]), with two small networks that look at one token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..builder_module import BuilderModule, without_autocast
from ..terms import LowRank

_SIZES = ("q_features", "k_features", "heads", "rank", "hidden")
#: of older files the networks serve all lengths
_CONFIG = {*_SIZES, "from_tokens"}
#: Features that vary less than this, relatively, are taken for constants.
_LEAST_SPREAD = 1e-6


class Linear(nn.Module):
    """A linear layer that starts as zeros: it draws no random numbers when it is built."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Like torch's linear layers: uniform within 1 / sqrt(inputs)."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        self.weight.uniform_(-bound, bound, generator=generator)
        self.bias.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TokenNetwork(nn.Module):
    """Three linear layers with tanh between them, applied to every token by itself.

    Args:
        features: C, the number of input features.
        hidden: width of the two hidden layers.
        outputs: number of outputs.
    """

    #: what is subtracted from the features, and what they are then divided by; shape (C,)
    mean: Tensor
    spread: Tensor

    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))
        self.first = Linear(features, hidden)
        self.second = Linear(hidden, hidden)
        self.third = Linear(hidden, outputs)

    def standardise(self, x: Tensor) -> None:
        """Have features like `x`, shape (tokens, C), enter with mean 0 and deviation 1."""
        mean, spread = x.mean(0), x.std(0, correction=0)
        floor = _LEAST_SPREAD * (1 + mean.abs())
        self.mean.copy_(mean)
        self.spread.copy_(torch.where(spread > floor, spread, torch.ones_like(spread)))

    def hidden_units(self, x: Tensor) -> Tensor:
        """What the last layer sees: (*batch, N, C) -> (*batch, N, hidden)."""
        x = (x - self.mean) / self.spread
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        """(*batch, N, C) -> (*batch, N, outputs)."""
        out: Tensor = self.third(self.hidden_units(x))
        return out


class FactorNetworks(BuilderModule):
    """phi_q and phi_k of a bias with `heads` heads and rank `rank`.

    Args:
        q_features: number of features of a query token.
        k_features: number of features of a key token.
        heads: H.
        rank: R.
        hidden: width of the hidden layers; 256 in the paper.
        from_tokens: calls with fewer queries are served by the bias itself, where its site can.

    Raises:
        ValueError: a size that is no positive integer.
    """

    kind: ClassVar[str] = "factor_network"

    #: size of each head's bias, fp32, shape (H,): the networks themselves make numbers near 1
    gain: Tensor

    def __init__(
        self,
        q_features: int,
        k_features: int,
        heads: int,
        rank: int,
        hidden: int = 256,
        from_tokens: int = 1,
    ) -> None:
        super().__init__()
        given = (q_features, k_features, heads, rank, hidden, from_tokens)
        for name, size in zip((*_SIZES, "from_tokens"), given, strict=True):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} must be a positive integer, got {size!r}")
        self.q_features, self.k_features = q_features, k_features
        self.heads, self.rank, self.hidden = heads, rank, hidden
        self.from_tokens = from_tokens
        self.register_buffer("gain", torch.ones(heads))
        self.phi_q = TokenNetwork(q_features, hidden, heads * rank)
        self.phi_k = TokenNetwork(k_features, hidden, heads * rank)

    def initialise(self, generator: torch.Generator) -> None:
        """Random weights; the generator is on the CPU, and so must the module be."""
        for layer in self.modules():
            if isinstance(layer, Linear):
                layer.initialise(generator)

    def config(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in _SIZES}
        # older versions can read files whose networks serve all lengths
        return sizes if self.from_tokens == 1 else {**sizes, "from_tokens": self.from_tokens}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        if set(config) | {"from_tokens"} != _CONFIG:
            raise ValueError(f"factor networks have {sorted(_CONFIG)}, got {sorted(config)}")
        return cls(**config)

    def factors(self, x_q: Tensor, x_k: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of one call, always fp32.

        Args:
            x_q: features of the queries, floating point, shape (*batch, N, q_features).
            x_k: features of the keys, shape (*batch, M, k_features).

        Returns:
            Shapes (*batch, H, N, R) and (*batch, H, M, R).

        Raises:
            ValueError: another number of features.
        """
        for name, x, size in (("x_q", x_q, self.q_features), ("x_k", x_k, self.k_features)):
            if x.dim() < 2 or x.shape[-1] != size:
                raise ValueError(
                    f"{name} must have shape (*batch, tokens, {size}), got {tuple(x.shape)}"
                )
        with without_autocast(x_q.device):
            phi_q = self._by_head(self.phi_q(x_q.float()))
            phi_k = self._by_head(self.phi_k(x_k.float()))
            return phi_q * self.gain[:, None, None], phi_k

    def _by_head(self, out: Tensor) -> Tensor:
        """(*batch, N, H * R) -> (*batch, H, N, R)."""
        return out.unflatten(-1, (self.heads, self.rank)).transpose(-2, -3)

    def make(self, *, x_q: Tensor, x_k: Tensor) -> LowRank:  # type: ignore[override]
        """The term of one call; see `factors`."""
        phi_q, phi_k = self.factors(x_q, x_k)
        # the fit loses more than the rounding of the factors, so no column is worth splitting
        return LowRank(phi_q=phi_q, phi_k=phi_k, split=0)

    def check(self) -> None:
        super().check()
        for name in ("phi_q", "phi_k"):
            if not bool((getattr(self, name).spread > 0).all()):
                raise ValueError(f"{name}.spread of {self.kind} is not positive")

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.config().items())
