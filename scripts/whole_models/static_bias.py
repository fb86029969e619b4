"""A static bias, and every way to compute attention with it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from flashbias_convert import Alibi, LowRank, ScoreBias
from flashbias_convert.decompose.closed_forms import alibi_slopes
from flashbias_convert.modules import ScoreBiasModule

from .case import BY_ROWS, EXACT, FLEX_ALIBI, ORIGINAL, SDPA, SDPA_CUDNN, WITHOUT_BIAS
from .hand import HandAttention, attention_by_rows, causal_mask, flex_alibi_on


@dataclasses.dataclass(frozen=True, eq=False)
class StaticBias:
    """A static bias, before anybody stores it; causal if it is ALiBi.

    Attributes:
        n: tokens.
        phi_q, phi_k: float32 (H, N, R); None for ALiBi.
        slopes: of ALiBi, float32 (H,).
    """

    n: int
    phi_q: Tensor | None = None
    phi_k: Tensor | None = None
    slopes: Tensor | None = None

    @classmethod
    def factors(cls, heads: int, n: int, rank: int, device: torch.device) -> StaticBias:
        """Random factors, always the same; entries of the bias have a variance of one."""
        draw = torch.randn(2, heads, n, rank, generator=torch.Generator().manual_seed(2))
        phi_q, phi_k = draw.to(device).unbind(0)
        return cls(n, phi_q / rank**0.5, phi_k)

    @classmethod
    def alibi(cls, heads: int, n: int, device: torch.device) -> StaticBias:
        """Causal ALiBi."""
        return cls(n, slopes=alibi_slopes(heads, "bloom").to(device))

    @property
    def causal(self) -> bool:
        return self.slopes is not None

    def rows(self, h: int, rows: slice) -> Tensor:
        """Rows of one head, (rows, N), float32; not causal."""
        if self.slopes is None:
            assert self.phi_q is not None and self.phi_k is not None
            return self.phi_q[h, rows] @ self.phi_k[h].T
        token = torch.arange(self.n, device=self.slopes.device)
        return self.slopes[h] * (token - token[rows, None])

    def dense(self, dtype: torch.dtype, *, hide: bool) -> Tensor:
        """The matrix (1, H, N, N); with minus infinity after a query, if it is causal.

        Args:
            dtype: of the result.
            hide: whether to write that; FlexAttention skips those keys.
        """
        some = self.phi_q if self.slopes is None else self.slopes
        assert some is not None
        out = torch.empty(1, len(some), self.n, self.n, dtype=dtype, device=some.device)
        for h in range(len(some)):  # one head at a time: no second matrix in float32
            own = self.rows(h, slice(None))
            if hide and self.causal:
                own.masked_fill_(torch.ones_like(own, dtype=torch.bool).triu_(1), float("-inf"))
            out[0, h] = own
        return out

    def terms(self, dtype: torch.dtype) -> ScoreBias:
        """As this package adds it.

        Factors are rounded to half precision once where the model is: whoever keeps the matrix
        keeps it in that dtype, and no column needs a low part to be as exact as that.

        Args:
            dtype: of the model.
        """
        if self.slopes is not None:
            return ScoreBias((Alibi(slopes=self.slopes),), len(self.slopes))
        assert self.phi_q is not None and self.phi_k is not None
        split = 0 if dtype in (torch.bfloat16, torch.float16) else None
        term = LowRank(phi_q=self.phi_q, phi_k=self.phi_k, split=split)
        return ScoreBias((term,), len(self.phi_q))


class OriginalAttention(nn.Module):
    """softmax(q k^T * scale + bias) v, with everything that hides keys in the bias."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.bias
        return scores.softmax(-1) @ v


class OwnAttention(nn.Module):
    """The operator of this package with the terms of the bias."""

    def __init__(self, bias: StaticBias, dtype: torch.dtype) -> None:
        super().__init__()
        self.score_bias = ScoreBiasModule(bias.terms(dtype))
        self.score_bias.prepared()
        self.causal = bias.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.score_bias(q, k, v, causal=self.causal)
        return out


class ByRows(nn.Module):
    """See `attention_by_rows`."""

    def __init__(self, bias: StaticBias) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias, scale = self.bias, q.shape[-1] ** -0.5
        return attention_by_rows(
            q, k, v, lambda h, rows: bias.rows(h, rows)[None].to(q.dtype),
            scale=scale, causal=bias.causal,
        )  # fmt: skip


class FlexAlibi(nn.Module):
    """FlexAttention that computes ALiBi in its score_mod."""

    def __init__(self, bias: StaticBias) -> None:
        super().__init__()
        assert bias.slopes is not None
        self.slopes, device = bias.slopes, bias.slopes.device
        self.slots = torch.arange(bias.n, device=device)
        self.blocks = create_block_mask(causal_mask, None, None, bias.n, bias.n, device=device)
        self.attend = flex_alibi_on(device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        return self.attend(q, k, v, self.slopes, self.slots, self.blocks, scale)


def attention(way: str, bias: StaticBias, dtype: torch.dtype, head_dim: int) -> nn.Module:
    """What computes the attention in a way."""
    if way == ORIGINAL:
        return OriginalAttention(bias.dense(dtype, hide=True))
    if way == EXACT:
        return OwnAttention(bias, dtype)
    if way == BY_ROWS:
        return ByRows(bias)
    if way == FLEX_ALIBI:
        return FlexAlibi(bias)
    none = torch.empty(1, 1, 1, 1)
    hide = way in (SDPA, SDPA_CUDNN)
    matrix = none if way in WITHOUT_BIAS else bias.dense(dtype, hide=hide)
    return HandAttention(way, matrix, head_dim**-0.5, bias.causal)
