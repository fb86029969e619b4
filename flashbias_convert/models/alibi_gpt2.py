"""GPT-2 with ALiBi in the place of its position table, as a transformers model.

Radford et al., *Language Models are Unsupervised Multitask Learners* (2019), with the linear biases
of Press et al., *Train Short, Test Long* (ICLR 2022). Weights are named and laid out as in
transformers' GPT-2, without ``wpe``. Importing this module registers the classes with
`AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..decompose.closed_forms import alibi_slopes
from ..errors import UsageError
from .alibi_gpt2_config import AlibiGPT2Config
from .caches import CACHE_FIELD, cached_sizes, fixed_length, one_of, padded_to, token_slots

#: what GPT-2 takes and this model does not: to ignore one of these would change the result
_REFUSED = {
    "position_ids": "positions follow attention_mask",
    "token_type_ids": "there are none",
    "encoder_hidden_states": "there is no cross-attention",
    "encoder_attention_mask": "there is no cross-attention",
    "output_attentions": "attention weights are not returned",
}


class AlibiGPT2Attention(nn.Module):
    """Causal attention with a bias and a mask that the model made: the eager reference.

    Args:
        config: sizes, scales, dropout.
        layer_idx: number of the block, from 0.
    """

    def __init__(self, config: AlibiGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.n_head
        self.head_dim = config.n_embd // config.n_head
        self.scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer_idx + 1
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        hidden_states: Tensor,
        bias: Tensor,
        attention_mask: Tensor,
        cache: Any = None,
        cache_position: Tensor | None = None,
    ) -> Tensor:
        """Softmax of q k^T * scale + bias + mask, times v.

        Args:
            hidden_states: shape (B, N, C).
            bias: shape (B or 1, H, N, M), float32 or wider; scores are softmaxed in its dtype.
            attention_mask: additive, shape (B or 1, 1, N, M), in the dtype of the bias.
            cache: a transformers cache, which takes the new keys and returns all M.
            cache_position: slots of the new keys, int64 (N,), for a cache of fixed length.

        Returns:
            Tensor (B, N, C).
        """
        batch, n, channels = hidden_states.shape
        qkv = self.c_attn(hidden_states).view(batch, n, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, {"cache_position": cache_position})
        scores = (q @ k.transpose(-1, -2)).to(bias.dtype) * self.scale + bias + attention_mask
        weights = self.attn_dropout(scores.softmax(-1).to(v.dtype))
        out = (weights @ v).transpose(1, 2).reshape(batch, n, channels)
        return self.resid_dropout(self.c_proj(out))


class AlibiGPT2Block(GradientCheckpointingLayer):
    """Attention and a feed-forward network, each behind a layer norm and beside a residual."""

    def __init__(self, config: AlibiGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = AlibiGPT2Attention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config.n_inner or 4 * config.n_embd, config)
        for branch in (self.attn, self.mlp):
            branch.c_proj.ends_branch = True  # see `_init_weights`

    def forward(
        self,
        hidden_states: Tensor,
        bias: Tensor,
        attention_mask: Tensor,
        cache: Any = None,
        cache_position: Tensor | None = None,
    ) -> Tensor:
        """Shapes as in `AlibiGPT2Attention.forward`."""
        normed = self.ln_1(hidden_states)
        attended = self.attn(
            normed, bias, attention_mask, cache=cache, cache_position=cache_position
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class AlibiGPT2PreTrainedModel(GPT2PreTrainedModel):
    """What loading, saving and initialising need to know."""

    config_class = AlibiGPT2Config
    config: AlibiGPT2Config
    _no_split_modules: ClassVar[list[str]] = ["AlibiGPT2Block"]
    _can_record_outputs: Any = None
    # what a GPT-2 has besides: its position table, and masks that old checkpoints hold
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        r"(^|\.)wpe\.weight$",
        r"\.attn\.(masked_)?bias$",
    ]
    # one way to compute attention, the eager one
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if getattr(module, "ends_branch", False):
            # two residual branches per block: GPT-2 scales what they add by 1 / sqrt(2 layers).
            # Asked of the projection itself: modules without weights of their own never come here
            std = self.config.initializer_range / (2 * self.config.n_layer) ** 0.5
            init.normal_(module.weight, mean=0.0, std=std)
        if isinstance(module, AlibiGPT2Model):
            init.copy_(module.slopes, module.new_slopes())  # no file holds them


class AlibiGPT2Model(AlibiGPT2PreTrainedModel):
    """The blocks. The model makes bias and mask once per forward and hands them to every block.

    Attributes:
        slopes: float32 (H,), whatever the dtype of the weights; follows from the configuration.
    """

    slopes: Tensor

    def __init__(self, config: AlibiGPT2Config) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(AlibiGPT2Block(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.register_buffer("slopes", self.new_slopes(), persistent=False)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.wte = value

    def new_slopes(self) -> Tensor:
        """The slopes that the configuration asks for, float32 (H,)."""
        config = self.config
        return alibi_slopes(config.n_head, config.alibi_slopes, bias_max=config.alibi_bias_max)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        moved: nn.Module = super()._apply(fn, recurse)
        if not self.slopes.is_meta:  # a cast must not round them
            self.slopes = self.new_slopes().to(self.slopes.device)
        return moved

    def build_bias(
        self, key_positions: Tensor, query_positions: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """ALiBi as a matrix: slope * (position of the key - position of the query).

        Args:
            key_positions: integers, shape (B or 1, M).
            query_positions: integers, shape (B or 1, N).
            dtype: of the result.

        Returns:
            Tensor of shape (B or 1, H, N, M).
        """
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        return distance[:, None].to(dtype) * self.slopes.to(dtype)[:, None, None]

    def build_mask(
        self,
        key_mask: Tensor | None,
        query_start: int | Tensor,
        n: int,
        m: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """The causal mask and the padding: 0, or the least number of `dtype` where hidden.

        A row that sees no key, that of a padding token, becomes a mean over all keys, as in GPT-2;
        no other row ever looks at it.

        Args:
            key_mask: bool, shape (B, M), True where a key exists; None means everywhere.
            query_start: position of the first query among the keys.
            n: number of queries.
            m: number of keys.
            dtype: of the result.

        Returns:
            Tensor of shape (B or 1, 1, N, M).
        """
        slots = token_slots(query_start, n, self.device)
        visible = (torch.arange(m, device=self.device) <= slots[:, None])[None]
        if key_mask is not None:
            visible = visible & key_mask[:, None, :]
        mask = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]

    def forward(
        self,
        input_ids: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states of new tokens.

        Args:
            input_ids: int64, shape (B, N); or `inputs_embeds`.
            cache: keys and values of the tokens before these, a transformers cache.
            attention_mask: shape (B, all tokens so far), nonzero = attend. Positions count the
                tokens that it keeps, so that a left-padded row computes what it would alone.
            inputs_embeds: floating point, shape (B, N, C), instead of `input_ids`.
            use_cache: whether to make and return a cache; default as in the configuration, and
                never while training.
            output_hidden_states: also return what enters the blocks, and the result.
            return_dict: False returns a tuple.
            past_key_values: another name of `cache`.
            **kwargs: what `generate` and `Trainer` pass along; arguments of GPT-2 that this model
                lacks are refused.

        Raises:
            UsageError: arguments that exclude each other, a mask of another shape, a cache under
                gradient checkpointing, or an argument that this model lacks.
        """
        _refuse(kwargs)
        hidden = self.drop(self._embed(input_ids, inputs_embeds))
        cache = self._cache(one_of(cache, past_key_values), use_cache)
        bias, mask, slots = self._bias_and_mask(hidden, attention_mask, cache)
        states = []
        for block in self.h:
            states.append(hidden)
            # positional: reentrant checkpointing sees gradients of positional arguments only
            hidden = block(hidden, bias, mask, cache=cache, cache_position=slots)
        hidden = self.ln_f(hidden)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=(*states, hidden) if output_hidden_states else None,
            **{CACHE_FIELD: None if use_cache is False else cache},
        )
        return output if _as_dict(self.config, return_dict) else output.to_tuple()

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("pass either input_ids or inputs_embeds")
        if inputs_embeds is not None:
            return inputs_embeds
        embedded: Tensor = self.wte(input_ids)
        return embedded

    def _cache(self, cache: Any, use_cache: bool | None) -> Any:
        if self.gradient_checkpointing and self.training:
            if cache is not None:
                raise UsageError("gradient checkpointing runs blocks twice: it cannot fill a cache")
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache(config=self.config) if use_cache and cache is None else cache

    def _bias_and_mask(
        self, hidden: Tensor, attention_mask: Tensor | None, cache: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What every block adds to its scores, and the slots of the new tokens."""
        n, device = hidden.shape[1], hidden.device
        start, m = cached_sizes(cache, n)
        slots = token_slots(start, n, device)
        key_mask, positions = None, torch.arange(m, device=device)[None]
        if attention_mask is not None:
            grows = fixed_length(cache) is None
            key_mask = padded_to(attention_mask.to(device), m, exact=grows)
            positions = (key_mask.long().cumsum(-1) - 1).clamp(min=0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        bias = self.build_bias(positions, positions.index_select(1, slots), wide)
        return bias, self.build_mask(key_mask, start, n, m, wide), slots


class AlibiGPT2LMHeadModel(AlibiGPT2PreTrainedModel, GenerationMixin):
    """The model with its tied language-model head."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: AlibiGPT2Config) -> None:
        super().__init__(config)
        self.transformer = AlibiGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Logits, and the loss where there are labels; see `AlibiGPT2Model.forward`.

        Args:
            labels: int64, shape (B, N), usually `input_ids`: they are shifted inside; -100 is
                ignored.
            logits_to_keep: how many of the last tokens get logits, or which; 0 means all.
        """
        output = self.transformer(
            input_ids,
            cache=one_of(cache, past_key_values),
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        kept: Any = logits_to_keep
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None)
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            **{CACHE_FIELD: output.get(CACHE_FIELD)},
        )
        return result if _as_dict(self.config, return_dict) else result.to_tuple()

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor | None:
        """What `generate` passes as attention mask with a cache of fixed length.

        Positions follow the padding, which a finished mask of four dimensions no longer shows. One
        shape for all steps, so that a compiled forward is compiled once.
        """
        most = fixed_length(one_of(cache, past_key_values))
        if attention_mask is None or most is None:
            return attention_mask
        return padded_to(attention_mask, most, exact=False)


def _refuse(kwargs: dict[str, Any]) -> None:
    for name, why in _REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise UsageError(f"this model takes no {name}: {why}")


def _as_dict(config: AlibiGPT2Config, return_dict: bool | None) -> bool:
    return getattr(config, "return_dict", True) if return_dict is None else return_dict


AutoConfig.register("alibi_gpt2", AlibiGPT2Config, exist_ok=True)
AutoModel.register(AlibiGPT2Config, AlibiGPT2Model, exist_ok=True)
AutoModelForCausalLM.register(AlibiGPT2Config, AlibiGPT2LMHeadModel, exist_ok=True)
