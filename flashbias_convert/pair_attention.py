"""What recipes for biases of a pair representation share (AlphaFold 2 and 3, ESMFold).

Such a bias is projected anew from the input of each call. There are three ways to serve it: as it
is, a dense term that the kernel adds (exact); from factor networks that were fitted to the site,
see `fit_sites`; and, while the pair representation stays what it is, from factors that are made
once, see `factors_once`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import flashbias_attention
from .decompose.factor_networks import FactorNetworks
from .decompose.pair_times import Pairs
from .patched_attention import PatchedAttention
from .recipe import Description, Observed


@dataclass(frozen=True, eq=False)
class PairCall:
    """One call of a site.

    Attributes:
        q, k, v: shapes (*batch, H, N, D), (*batch, H, M, D) and (*batch, H, M, Dv).
        source: the tensor that the bias is made from; as long as it is the same, so is the bias.
        bias: makes the bias, (*batch, H, N, M); a batch dimension that shares it has size 1.
        features: makes features of the tokens for factor networks, (*batch, N, C).
        single: more of them, (*batch, N, C'): the tokens themselves, where they belong to the
            structure, as in a trunk; in a diffusion module they change from step to step.
        key_mask: bool, (*batch, M), False for keys that nobody may see; None means all count.
        tokens: bool, (*batch, N) with the batch dimensions of the bias: which tokens count.
        scale: of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    source: Tensor
    bias: Callable[[], Tensor]
    features: Callable[[], Tensor]
    single: Tensor | None = None
    key_mask: Tensor | None = None
    tokens: Tensor | None = None
    scale: float = 1.0

    def token_features(self, width: int | None = None) -> Tensor:
        """Features with the tokens themselves behind them, fp32, shape (*batch, N, C + C').

        Args:
            width: of the networks that are fed. Older files have networks of C features alone.

        Raises:
            ValueError: queries and keys are not the same tokens.
        """
        if self.q.shape[-2] != self.k.shape[-2]:
            raise ValueError("its queries and keys are not the same tokens, as networks see them")
        x = self.features()
        if self.single is None or x.shape[-1] == width:
            return x
        return torch.cat([x, self.single.float()], -1)

    def observed(self) -> Observed:
        """What a fit needs to know of this call."""
        x = self.token_features()
        return Observed(x, x, self.bias(), self.tokens, self.q, self.k, self.v, scale=self.scale)


class PairAttention(PatchedAttention):
    """Base of patched attention whose bias is projected from a pair representation."""

    def bias_weights(self) -> tuple[Tensor, ...]:
        """What the site itself projects its bias with."""
        raise NotImplementedError

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        # a projected bias follows its weights; networks were fitted to what these were
        return self.bias_weights() if self._is_fitted() else ()

    def _is_fitted(self) -> bool:
        return self._networks() is not None

    def _networks(self) -> FactorNetworks | None:
        """Those that were fitted to the site."""
        found: Any = self.score_bias.builder_modules().get(FactorNetworks.kind)
        return None if found is None else found

    def _by_networks(self, call: PairCall, networks: FactorNetworks) -> bool:
        """Whether they serve a call, and not the bias as it is, if that can be had."""
        tokens, keys = call.q.shape[-2], call.k.shape[-2]
        return not self.score_bias.builders or (tokens >= networks.from_tokens and tokens == keys)

    def attend(self, call: PairCall, gate: Tensor | None = None) -> Tensor:
        """Attention with the bias of this call, shape (*batch, H, N, Dv).

        Args:
            call: what it attends with.
            gate: the result is multiplied by the sigmoid of it; shape (*batch, H, N, Dv).
        """
        kwargs: dict[str, Any] = {"scale": call.scale, "key_mask": call.key_mask, "gate": gate}
        networks = self._networks()
        if networks is not None and self._by_networks(call, networks):
            x = call.token_features(networks.q_features)
            built = {FactorNetworks.kind: {"x_q": x, "x_k": x}}
            return self.score_bias(call.q, call.k, call.v, built=built, **kwargs)
        memory = self.score_bias.pair_memory
        weights = () if memory is None else self.bias_weights()
        if memory is not None and memory.serves(call.source, weights):
            size, rows = call.q.shape[-1], math.prod(call.q.shape[:-3])
            prepared = memory.prepared(call.source, weights, call.bias, size, rows)
            backend = self.score_bias.backend
            return flashbias_attention(call.q, call.k, call.v, prepared, backend=backend, **kwargs)
        built = {"dense": {"bias": call.bias()}}
        return self.score_bias(call.q, call.k, call.v, built=built, **kwargs)


def gate_of(attention: Any, x: Tensor) -> Tensor | None:
    """What the sigmoid is taken of in the gate of OpenFold's `Attention`, or Protenix's.

    Args:
        attention: the module; without a gate its `linear_g` is None.
        x: input of the queries, shape (*, N, C).

    Returns:
        Tensor of shape (*, H, N, D), or None.
    """
    if attention.linear_g is None:
        return None
    heads = attention.no_heads if hasattr(attention, "no_heads") else attention.num_heads
    logits: Tensor = attention.linear_g(x)
    return logits.unflatten(-1, (heads, -1)).transpose(-2, -3)


def described(heads: int, tokens: int | None, head_dim: int, pairs: Pairs) -> Description:
    """A site whose bias comes dense in each call, and can be fitted.

    Args:
        heads: H.
        tokens: to plan for; models leave it open, and 384 is the usual crop of training.
        head_dim: D.
        pairs: what the bias is made from.
    """
    n = tokens or 384
    return Description(
        None, heads, n, n, head_dim, builders=("dense",), depends_on_input=True, pairs=pairs
    )
