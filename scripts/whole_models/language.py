"""GPT-2 with ALiBi and BLOOM's shapes; written by hand as an expert would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, StaticCache

from flashbias_convert.models.alibi_gpt2 import (
    AlibiGPT2Attention,
    AlibiGPT2LMHeadModel,
    AlibiGPT2Model,
)
from flashbias_convert.models.alibi_gpt2_config import AlibiGPT2Config
from flashbias_convert.models.caches import CACHE_FIELD, cached_sizes, token_slots

from .case import (
    BY_ROWS,
    CUDNN,
    EXACT,
    FLEX,
    FLEX_ALIBI,
    MODES,
    NO_BIAS,
    NONE_CUDNN,
    NONE_FLEX,
    ORIGINAL,
    SDPA,
    SDPA_CUDNN,
    Case,
    converted,
)
from .hand import (
    aligned,
    attention_by_rows,
    causal_mask,
    flex_alibi_on,
    flex_bare_on,
    flex_on,
    sdpa,
    whole,
)

_WAYS = (ORIGINAL, SDPA, SDPA_CUDNN, FLEX, FLEX_ALIBI, NO_BIAS, NONE_CUDNN, EXACT)
#: a cache would need a mask
_PROMPT_WAYS = (*_WAYS[:-1], NONE_FLEX, EXACT)
#: logits of so many last tokens: a prefill needs one, a comparison more
_KEPT = 16
#: slots of a fixed cache beyond those that are filled: every timed call takes one
_SLOTS = 128


class HandAlibiAttention(AlibiGPT2Attention):
    """Takes what `HandAlibiModel` prepared in the place of bias and mask."""

    way: str
    cudnn: bool
    attend: Callable[..., Tensor]

    def forward(
        self,
        hidden_states: Tensor,
        bias: Any,
        attention_mask: Any,
        cache: Any = None,
        cache_position: Tensor | None = None,
    ) -> Tensor:
        qkv = self.c_attn(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, {"cache_position": cache_position})
        out = self._attend(q, k, v, bias, attention_mask, cache_position)
        return self.c_proj(out.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, slots: Any) -> Tensor:
        if self.way in (SDPA, NO_BIAS):
            causal = bias is None and q.shape[-2] == k.shape[-2]
            return sdpa(q, k, v, bias, self.scale, causal=causal, cudnn=self.cudnn)
        if self.way == NONE_FLEX:
            return self.attend(q, k, v, mask, self.scale)
        if self.way == FLEX:
            return self.attend(q, k, v, bias[0], None, mask, self.scale)
        if self.way == FLEX_ALIBI:
            return self.attend(q, k, v, bias, slots, mask, self.scale)
        assert self.way == BY_ROWS and q.shape[-2] == k.shape[-2]
        wide = torch.promote_types(q.dtype, torch.float32)  # as the original makes its bias
        keys = torch.arange(k.shape[-2], device=q.device, dtype=wide)
        return attention_by_rows(
            q, k, v,
            lambda h, rows: (bias[h] * (keys - keys[rows, None]))[None],
            scale=self.scale, causal=True,
        )  # fmt: skip


class HandAlibiModel(AlibiGPT2Model):
    """Makes once a call what all layers add; for a prompt once for all calls of its length."""

    way: str
    known: dict[tuple[int, torch.dtype], tuple[Any, Any]]

    def _bias_and_mask(
        self, hidden: Tensor, attention_mask: Tensor | None, cache: Any
    ) -> tuple[Any, Any, Tensor]:
        assert attention_mask is None
        n, device, dtype = hidden.shape[1], hidden.device, hidden.dtype
        start, m = cached_sizes(cache, n)
        slots = token_slots(start, n, device)
        if n > 1:
            return (*self.known[n, dtype], slots)
        if self.way == FLEX_ALIBI:
            return self.slopes, None, slots
        keys = torch.arange(m, device=device)
        padded = torch.arange(aligned(m), device=device)
        grows = isinstance(start, int)
        if self.way == NO_BIAS:
            return (None if grows else (keys <= slots[:, None])[None, None]), None, slots
        added = self.slopes[:, None, None] * (padded - slots[:, None])
        if not grows:
            added = added.masked_fill(padded > slots[:, None], float("-inf"))
        bias = added[None].to(dtype)
        bias = whole(bias) if self.way == FLEX else bias
        return bias[..., :m], None, slots

    def know(self, n: int, dtype: torch.dtype) -> None:
        """Prepare for prompts of n tokens."""
        device = self.slopes.device
        bias: Tensor | None = None
        blocks = None
        if self.way in (SDPA, FLEX):
            rows = self.slopes.new_zeros(1, len(self.slopes), n, aligned(n), dtype=dtype)
            bias = rows[..., :n]
            keys = torch.arange(n, device=device)
            distance = keys - keys[:, None]
            hidden = distance > 0
            for h, slope in enumerate(self.slopes):
                own = slope * distance
                bias[0, h] = own.masked_fill(hidden, float("-inf")) if self.way == SDPA else own
        elif self.way in (FLEX_ALIBI, BY_ROWS):
            bias = self.slopes
        if self.way in (FLEX, FLEX_ALIBI, NONE_FLEX):
            blocks = create_block_mask(causal_mask, None, None, n, n, device=device)
        self.known[n, dtype] = (bias, blocks)


def by_hand(model: Any, way: str) -> nn.Module:
    """Change the classes of the model and of its attention."""
    body, device = model.transformer, model.transformer.slopes.device
    cudnn, way = way in CUDNN, CUDNN.get(way, way)
    body.__class__, body.way, body.known = HandAlibiModel, way, {}
    of_way = {FLEX_ALIBI: flex_alibi_on, NONE_FLEX: flex_bare_on}
    attend: Any = of_way.get(way, flex_on)(device)
    for block in body.h:
        block.attn.__class__, block.attn.way, block.attn.attend = HandAlibiAttention, way, attend
        block.attn.cudnn = cudnn
    return model


def _make(config: dict[str, Any]) -> Callable[[torch.device], nn.Module]:
    def make(device: torch.device) -> nn.Module:
        with device:
            return AlibiGPT2LMHeadModel(AlibiGPT2Config(**config))

    return make


def _alter(model: nn.Module, way: str) -> nn.Module:
    return converted(model, way) if way == EXACT else by_hand(model, way)


def _ids(config: dict[str, Any], batch: int, n: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randint(config["vocab_size"], (n,), generator=generator) for _ in range(batch)]
    return torch.stack(draw).to(device)


def prefill(name: str, config: dict[str, Any], batch: int, n: int) -> Case:
    """A prompt without a cache; logits of its last tokens."""

    def inputs(model: Any, way: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        if isinstance(model.transformer, HandAlibiModel):
            model.transformer.know(n, dtype)
        kept = {"use_cache": False, "logits_to_keep": min(_KEPT, n)}
        return (_ids(config, count, n, device),), kept

    return Case(f"{name}, prefill {n}", batch, n, _PROMPT_WAYS, _make(config), inputs, _alter)


def decode(name: str, config: dict[str, Any], batch: int, n: int, fixed: bool) -> Case:
    """One token after n others, whose keys and values are random.

    Args:
        name, config, batch, n: as they are called.
        fixed: whether the cache has a fixed length, as compiled decoding wants it. The other kind
            grows; it is not compiled.
    """

    def inputs(model: Any, way: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        most = {"max_cache_len": n + _SLOTS}
        cache: Any = StaticCache(config=model.config, **most) if fixed else None
        if cache is None:
            cache = DynamicCache(config=model.config)
        _fill(cache, model.config, count, n, device, dtype)
        return (_ids(config, count, 1, device),), {CACHE_FIELD: cache, "use_cache": True}

    kind = "fixed cache" if fixed else "growing cache"
    modes = MODES if fixed else MODES[:1]
    title = f"{name}, decode at {n}, {kind}"
    return Case(title, batch, n, _WAYS, _make(config), inputs, _alter, modes)


@torch.no_grad()
def _fill(
    cache: Any, config: Any, batch: int, n: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Random keys and values in every layer, those of bfloat16 in any dtype."""
    heads, size = config.n_head, config.n_embd // config.n_head
    where = {"cache_position": torch.arange(n, device=device)}
    for layer in range(config.n_layer):
        # one generator a sample: sample 0 is the same for any batch
        both = [
            torch.randn(2, heads, n, size, device=device,
                        generator=torch.Generator(device).manual_seed(1000 * layer + b))
            for b in range(batch)
        ]  # fmt: skip
        k, v = torch.stack(both, 1).bfloat16().to(dtype).unbind(0)
        cache.update(k, v, layer, where)


def gpt2(layers: int = 48, channels: int = 1600, heads: int = 50, vocabulary: int = 50257) -> Any:
    """The configuration of the paper: GPT-2 of 1.5 billion parameters."""
    sizes = {"n_layer": layers, "n_embd": channels, "n_head": heads, "vocab_size": vocabulary}
    return {**sizes, "bos_token_id": 0, "eos_token_id": 0}


def cases(tiny: bool = False) -> dict[str, Case]:
    """By the names of the command line."""
    small = gpt2(2, 32, 4, 40)
    name, config, lengths = "GPT-2 1.5B", gpt2(), {"2k": 2048, "8k": 8192}
    seven, bloom, batch = "BLOOM-like 7B", gpt2(30, 4096, 32, 250880), 8
    if tiny:
        name, config, lengths = "GPT-2 tiny", small, {"2k": 20, "8k": 40}
        seven, bloom, batch = "BLOOM-like tiny", small, 2
    found = {}
    for key, n in lengths.items():
        found[f"gpt2-prefill-{key}"] = prefill(name, config, 1, n)
        found[f"gpt2-decode-{key}"] = decode(name, config, 1, n, True)
        found[f"gpt2-decode-{key}-growing"] = decode(name, config, 1, n, False)
    n = lengths["2k"]
    found["bloom7b-decode"] = decode(seven, bloom, batch, n, True)
    found["bloom7b-decode-growing"] = decode(seven, bloom, batch, n, False)
    return found
