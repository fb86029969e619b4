"""Encoders of sound as Microsoft's repository has them, BEATs and WavLM, written anew.

The first layer makes a bias of the distance that all others are handed, and each query gates it.
Attention takes (N, B, C).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .copied_texts import feed_forward


class MultiheadAttention(nn.Module):
    """That of BEATs, whose gates are made from projected queries."""

    num_buckets, max_distance = 320, 800

    def __init__(self, width: int, heads: int, first: bool, gated: bool = True) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = width, heads, width // heads
        self.scaling = self.head_dim**-0.5
        self.has_relative_attention_bias, self.gru_rel_pos = first, gated
        if first:
            self.relative_attention_bias = nn.Embedding(self.num_buckets, heads)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(width, width))
        if gated:
            self.grep_linear = nn.Linear(self.head_dim, 8)
            self.grep_a = nn.Parameter(torch.ones(1, heads, 1, 1))
        self.dropout_module = nn.Dropout(0.1)

    def _relative_positions_bucket(self, distance: Tensor, bidirectional: bool = True) -> Tensor:
        """Half of the buckets for each direction, half of these for one distance each."""
        assert bidirectional
        half, far = self.num_buckets // 2, distance.abs()
        exact = half // 2
        span = math.log(self.max_distance / exact)
        wide = exact + ((far.float() / exact).log() / span * (half - exact)).long()
        return (distance > 0) * half + torch.where(far < exact, far, wide.clamp(max=half - 1))

    def compute_bias(self, queries: int, keys: int) -> Tensor:
        """(H, N, M)."""
        bucket = self._relative_positions_bucket(
            torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
        )
        table = self.relative_attention_bias
        return table(bucket.to(table.weight.device)).permute(2, 0, 1)

    def split(self, x: Tensor) -> Tensor:
        """(N, B, C) -> (B, H, N, D)."""
        return x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)

    def gate(self, x: Tensor) -> Tensor:
        """What multiplies the rows of the bias, (B, H, N, 1)."""
        a, b = self.grep_linear(x).unflatten(-1, (2, 4)).sum(-1).sigmoid().chunk(2, -1)
        return a * (b * self.grep_a - 1) + 2

    def made_bias(self, query: Tensor, handed: Tensor | None) -> Tensor | None:
        """What is handed on, (B H, N, N)."""
        if handed is None and self.has_relative_attention_bias:
            return self.compute_bias(len(query), len(query)).repeat(query.shape[1], 1, 1)
        return handed

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: Any = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        position_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert incremental_state is None and not static_kv
        position_bias = self.made_bias(query, position_bias)
        q, k, v = (
            self.split(project(x))
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        scores = q * (self.scaling / 32) @ k.transpose(-2, -1)
        scores = (scores - scores.amax(-1, keepdim=True)) * 32
        if attn_mask is not None:
            scores = scores + attn_mask
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :].bool(), -math.inf)
        if before_softmax:
            return scores.flatten(0, 1), v.flatten(0, 1), position_bias
        if position_bias is not None:
            bias = position_bias.view(scores.shape)
            scores = scores + (self.gate(q) * bias if self.gru_rel_pos else bias)
        weights = scores.softmax(-1)
        out = (self.dropout_module(weights) @ v).permute(2, 0, 1, 3).flatten(2)
        if not need_weights and not need_head_weights:
            return self.out_proj(out), None, position_bias
        shown = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        return self.out_proj(out), shown, position_bias


class QueryGated(MultiheadAttention):
    """That of WavLM, whose gates are made before; torch's function attends."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: Any = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        position_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert incremental_state is None and attn_mask is None
        position_bias = self.made_bias(query, position_bias)
        bias = position_bias
        if bias is not None and self.gru_rel_pos:
            bias = self.gate(self.split(query)).flatten(0, 1) * bias
        layers = (self.q_proj, self.k_proj, self.v_proj)
        out, weights = F.multi_head_attention_forward(
            query, key, value, self.embed_dim, self.num_heads, torch.empty(0),
            torch.cat([layer.bias for layer in layers]), None, None, False, self.dropout_module.p,
            self.out_proj.weight, self.out_proj.bias, self.training, key_padding_mask,
            need_weights, bias, use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight, k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
        )  # fmt: skip
        return out, weights, position_bias


QueryGated.__name__ = QueryGated.__qualname__ = "MultiheadAttention"


class EncoderLayer(nn.Module):
    """Attention and a feed-forward layer; it hands on the bias."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.self_attn, self.norm = attention, nn.LayerNorm(width)
        self.mlp = feed_forward(width)

    def forward(
        self,
        x: Tensor,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        pos_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        normed = self.norm(x)
        out, weights, pos_bias = self.self_attn(
            query=normed, key=normed, value=normed, key_padding_mask=self_attn_padding_mask,
            need_weights=need_weights, attn_mask=self_attn_mask, position_bias=pos_bias,
        )  # fmt: skip
        x = x + out
        return x + self.mlp(x), weights, pos_bias


class TransformerEncoder(nn.Module):
    """Frames (B, N, C) and which of them are padding, (B, N).

    Args:
        attentions: of the layers, the first of which has a table.
        width: C.
        shared: whether all layers have the table of the first, as in BEATs.
    """

    def __init__(self, attentions: list[nn.Module], width: int, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer(a, width) for a in attentions])
        if shared:
            for attention in attentions[1:]:
                attention.relative_attention_bias = attentions[0].relative_attention_bias

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        streaming_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Any:
        x, pos_bias, shown = x.transpose(0, 1), None, []
        for _, layer in enumerate(self.layers):
            x, weights, pos_bias = layer(
                x, self_attn_padding_mask=padding_mask, need_weights=need_weights,
                self_attn_mask=streaming_mask, pos_bias=pos_bias,
            )  # fmt: skip
            if weights is not None:
                shown.append(weights)
        return (x.transpose(0, 1), shown) if need_weights else x.transpose(0, 1)


def beats(layers: int, width: int, heads: int, gated: bool = True) -> TransformerEncoder:
    """All layers have the table."""
    made: list[nn.Module] = [MultiheadAttention(width, heads, True, gated) for _ in range(layers)]
    return TransformerEncoder(made, width, shared=True)


def wavlm(layers: int, width: int, heads: int, gated: bool = True) -> TransformerEncoder:
    """The first layer has a table."""
    made: list[nn.Module] = [QueryGated(width, heads, i == 0, gated) for i in range(layers)]
    return TransformerEncoder(made, width)
