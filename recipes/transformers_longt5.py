"""The encoder of LongT5 of transformers: blocks of text, with and without global tokens.

Layer 0 makes the bias of all blocks, and hands it on with the mask already added: numbers that grow
with the length of the text, not with its square. It stays a dense term.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.fallback import WEIGHTS, say_original
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site


class BlockAttention(PatchedAttention):
    """`LongT5LocalAttention` and `LongT5TransientGlobalAttention`; the scale is 1."""

    n_heads: int
    key_value_proj_dim: int
    block_len: int
    global_block_size: int  # of the second class, as the next
    global_input_layer_norm: nn.Module
    has_relative_attention_bias: bool
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.n_heads, self.block_len)  # layer 0 makes the bias anew in each call

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, ...]:
        from transformers.models.longt5 import modeling_longt5 as longt5

        if output_attentions:
            say_original(WEIGHTS)
            original: tuple[Tensor, ...] = self.original_forward(
                hidden_states, mask, position_bias, output_attentions
            )
            return original
        (batch, n), split = hidden_states.shape[:2], longt5._split_into_blocks
        shape = (batch, -1, self.n_heads, self.key_value_proj_dim)
        q = split(self.q(hidden_states).view(shape), self.block_len, dim=1)  # (B, blocks, L, H, D)
        k, v = (
            longt5._concatenate_3_blocks(
                split(project(hidden_states).view(shape), self.block_len, dim=1), 1, 2
            )
            for project in (self.k, self.v)
        )
        if self._has_globals():
            (k, v), segments = self._with_globals(hidden_states, mask, (k, v))
            if position_bias is None:
                position_bias = self._bias_with_globals(hidden_states, mask, segments)
        elif position_bias is None:
            position_bias = self._local_bias(hidden_states.dtype)
            if mask is not None:  # (B, 1, blocks, L, 3 L)
                position_bias = position_bias + _hidden(mask.transpose(1, 2))
        q, k, v = (x.transpose(2, 3) for x in (q, k, v))  # (B, blocks, H, L, D)
        built = {"dense": {"bias": position_bias}}
        out = self.score_bias(q, k, v, built=built, scale=1.0).transpose(2, 3)
        out = out.reshape(batch, -1, self.n_heads * self.key_value_proj_dim)[:, :n]
        return self.o(out), position_bias

    def _has_globals(self) -> bool:
        return hasattr(self, "global_input_layer_norm")

    def _local_bias(self, dtype: torch.dtype) -> Tensor:
        if self.has_relative_attention_bias:
            made: Tensor = self.compute_bias(self.block_len)  # type: ignore[operator]
            return made
        size = (1, 1, self.n_heads, self.block_len, 3 * self.block_len)
        return torch.zeros(size, dtype=dtype, device=self.q.weight.device)

    def _with_globals(
        self, hidden_states: Tensor, mask: Tensor | None, heads: tuple[Tensor, Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Keys and values, those of the global tokens behind them; and the segments of these."""
        from transformers.models.longt5 import modeling_longt5 as longt5

        seen = torch.ones(hidden_states.shape[:-1]) if mask is None else mask
        ids, segments = longt5._make_global_fixed_block_ids(seen, self.global_block_size)
        made = longt5._create_global_aggregates(hidden_states, ids, segments.shape[-1])
        made = self.global_input_layer_norm(made)
        done = []
        for project, local in zip((self.k, self.v), heads, strict=True):
            side = project(made).view(made.shape[0], 1, -1, self.n_heads, self.key_value_proj_dim)
            done.append(torch.cat([local, side.expand(-1, local.shape[1], -1, -1, -1)], dim=2))
        return done, segments

    def _bias_with_globals(
        self, hidden_states: Tensor, mask: Tensor | None, segments: Tensor
    ) -> Tensor:
        from transformers.models.longt5 import modeling_longt5 as longt5

        dtype, device = hidden_states.dtype, hidden_states.device
        local = self._local_bias(dtype)
        if mask is not None:
            arrived = longt5._get_local_attention_mask(mask, self.block_len, device)
            local = local + _hidden(arrived.transpose(1, 2))
        seen = torch.ones(hidden_states.shape[:-1]) if mask is None else mask
        side = self.compute_side_bias(seen, segments)  # type: ignore[operator]
        side = longt5._split_into_blocks(side, self.block_len, dim=-2).transpose(1, 2)
        return torch.cat([local.to(dtype), side.to(device, dtype)], dim=-1)


def _hidden(mask: Tensor) -> Tensor:
    """As the original has it: what is hidden gets -1e10."""
    return torch.where(mask > 0, 0.0, -1e10)


def describe(site: Site) -> Description:
    """A block of queries, three of keys, and the global tokens; each call makes the bias."""
    module: Any = site.module
    n = module.block_len
    size = getattr(module, "global_block_size", 0)
    m = 3 * n + ((site.tokens or 4096) // size if size else 0)
    heads, width = module.n_heads, module.key_value_proj_dim
    return Description(None, heads, n, m, width, builders=("dense",))


_MODULE = "transformers.models.longt5.modeling_longt5"

recipe = Recipe(
    name="transformers_longt5",
    title="Encoder of LongT5 (transformers)",
    classes=(f"{_MODULE}.LongT5LocalAttention", f"{_MODULE}.LongT5TransientGlobalAttention"),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=BlockAttention,
    describe=describe,
    about=About(
        models="encoder of LongT5, local and transient global; its decoder is one of T5",
        exact="a dense term of linear size, with its mask, that layer 0 makes",
        n="128 x 384 and the global tokens",
    ),
)
