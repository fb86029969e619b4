"""Encoders of texts whose code comes with a checkpoint, written as it is: ALiBi both ways.

Their feed-forward layers are the usual ones: what matters here is how they attend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def matrix(heads: int, size: int, device: Any = None) -> Tensor:
    """Minus a slope times the distance, (1, H, size, size)."""
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)
    slopes = slopes.bfloat16().float()  # that every dtype holds
    place = torch.arange(size, device=device)
    return (-slopes[:, None, None] * (place[:, None] - place[None, :]).abs())[None]


def feed_forward(width: int) -> nn.Module:
    """Four times as wide inside."""
    parts = (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
    return nn.Sequential(*parts, nn.Linear(4 * width, width))


class JinaBertSelfAttention(nn.Module):
    """That of jina-embeddings-v2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, width // heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        self.position_embedding_type, self.is_decoder = "alibi", False

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        made = (part(hidden_states) for part in (self.query, self.key, self.value))
        q, k, v = (x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2) for x in made)
        scores = q @ k.transpose(-1, -2) / self.attention_head_size**0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        out = self.dropout((scores + bias).softmax(-1)) @ v
        return (out.transpose(1, 2).contiguous().flatten(2),)


class JinaBertLayer(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.out = JinaBertSelfAttention(width, heads), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), feed_forward(width)

    def forward(self, x: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.norm(x), mask, bias=bias)[0])
        out: Tensor = x + self.mlp(x)
        return out


class JinaBertEncoder(nn.Module):
    """Keeps a matrix, and makes a larger one where it must."""

    alibi: Tensor

    def __init__(self, layers: int, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList([JinaBertLayer(width, heads) for _ in range(layers)])
        self.num_attention_heads = heads
        self.register_buffer("alibi", self.rebuild_alibi_tensor(size=size), persistent=False)

    def rebuild_alibi_tensor(self, size: int, device: Any = None) -> Tensor:
        self._current_alibi_size = size
        return matrix(self.num_attention_heads, size, device)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        n = hidden_states.shape[1]
        if self._current_alibi_size < n:
            made = self.rebuild_alibi_tensor(size=n, device=hidden_states.device)
            self.register_buffer("alibi", made.to(hidden_states.dtype), persistent=False)
        elif self.alibi.device != hidden_states.device:
            self.alibi = self.alibi.to(hidden_states.device)
        bias = self.alibi[:, :, :n, :n]
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask, bias)
        return hidden_states


class BertUnpadSelfAttention(nn.Module):
    """That of MosaicBERT, without its kernel: (tokens, C), of all texts in one row."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, width // heads
        self.p_dropout, self.dropout = 0.1, nn.Dropout(0.1)
        self.Wqkv = nn.Linear(width, 3 * width)

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        max_seqlen_in_batch: int,
        indices: Tensor,
        attn_mask: Tensor,
        bias: Tensor,
    ) -> Tensor:
        batch, n, heads = len(cu_seqlens) - 1, max_seqlen_in_batch, self.num_attention_heads
        qkv = self.Wqkv(hidden_states)
        packed = qkv.new_zeros(batch * n, qkv.shape[-1])
        packed[indices] = qkv
        q, k, v = packed.view(batch, n, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / self.attention_head_size**0.5
        out = self.dropout((scores + bias).softmax(-1)) @ v
        return out.transpose(1, 2).reshape(batch * n, -1)[indices]


class BertLayer(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.out = BertUnpadSelfAttention(width, heads), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), feed_forward(width)

    def forward(self, x: Tensor, *call: Any) -> Tensor:
        x = x + self.out(self.attention(self.norm(x), *call))
        out: Tensor = x + self.mlp(x)
        return out


class BertEncoder(nn.Module):
    """Takes the padding out, and adds it to its matrix."""

    def __init__(self, layers: int, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList([BertLayer(width, heads) for _ in range(layers)])
        self.num_attention_heads = heads
        self.rebuild_alibi_tensor(size)

    def rebuild_alibi_tensor(self, size: int, device: Any = None) -> None:
        self._current_alibi_size = size
        self.alibi = matrix(self.num_attention_heads, size, device)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        n = hidden_states.shape[1]
        padding = (1.0 - attention_mask[:, None, None].to(hidden_states.dtype)) * -10000.0
        if self._current_alibi_size < n:
            self.rebuild_alibi_tensor(n, hidden_states.device)
        else:
            self.alibi = self.alibi.to(hidden_states.device)
        bias = padding[:, :, :n, :n] + self.alibi[:, :, :n, :n].to(hidden_states.dtype)
        indices = attention_mask.flatten().nonzero().flatten()
        lengths = attention_mask.sum(-1).cumsum(0)
        starts = torch.cat([lengths.new_zeros(1), lengths]).int()
        x = hidden_states.flatten(0, 1)[indices]
        for layer in self.layer:
            x = layer(x, starts, n, indices, attention_mask, bias)
        return x.unflatten(0, (len(attention_mask), -1))  # nothing is padded here
