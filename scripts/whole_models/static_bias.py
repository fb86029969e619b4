"""A static bias of random factors, and every way to compute attention with it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from flashbias_convert import LowRank, ScoreBias
from flashbias_convert.modules import ScoreBiasModule

from .case import BY_ROWS, EXACT, ORIGINAL, WITHOUT_BIAS
from .hand import HandAttention, attention_by_rows


@dataclasses.dataclass(frozen=True, eq=False)
class StaticBias:
    """A static bias, before anybody stores it.

    Attributes:
        n: tokens.
        phi_q, phi_k: float32 (H, N, R).
    """

    n: int
    phi_q: Tensor
    phi_k: Tensor

    @classmethod
    def factors(cls, heads: int, n: int, rank: int, device: torch.device) -> StaticBias:
        """Random factors, always the same; entries of the bias have a variance of one."""
        draw = torch.randn(2, heads, n, rank, generator=torch.Generator().manual_seed(2))
        phi_q, phi_k = draw.to(device).unbind(0)
        return cls(n, phi_q / rank**0.5, phi_k)

    def rows(self, h: int, rows: slice) -> Tensor:
        """Rows of one head, (rows, N), float32."""
        return self.phi_q[h, rows] @ self.phi_k[h].T

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix (1, H, N, N) in a dtype."""
        heads = len(self.phi_q)
        out = torch.empty(1, heads, self.n, self.n, dtype=dtype, device=self.phi_q.device)
        for h in range(heads):  # one head at a time: no second matrix in float32
            out[0, h] = self.rows(h, slice(None))
        return out

    def terms(self, dtype: torch.dtype) -> ScoreBias:
        """As this package adds it.

        Factors are rounded to half precision once where the model is: whoever keeps the matrix
        keeps it in that dtype, and no column needs a low part to be as exact as that.

        Args:
            dtype: of the model.
        """
        split = 0 if dtype in (torch.bfloat16, torch.float16) else None
        term = LowRank(phi_q=self.phi_q, phi_k=self.phi_k, split=split)
        return ScoreBias((term,), len(self.phi_q))


class OriginalAttention(nn.Module):
    """softmax(q k^T * scale + bias) v."""

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.score_bias(q, k, v)
        return out


class ByRows(nn.Module):
    """See `attention_by_rows`."""

    def __init__(self, bias: StaticBias) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias, scale = self.bias, q.shape[-1] ** -0.5
        return attention_by_rows(
            q, k, v, lambda h, rows: bias.rows(h, rows)[None].to(q.dtype), scale=scale
        )


def attention(way: str, bias: StaticBias, dtype: torch.dtype, head_dim: int) -> nn.Module:
    """What computes the attention in a way."""
    if way == ORIGINAL:
        return OriginalAttention(bias.dense(dtype))
    if way == EXACT:
        return OwnAttention(bias, dtype)
    if way == BY_ROWS:
        return ByRows(bias)
    matrix = torch.empty(1, 1, 1, 1) if way in WITHOUT_BIAS else bias.dense(dtype)
    return HandAttention(way, matrix, head_dim**-0.5)
