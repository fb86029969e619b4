"""Switch Transformers of transformers: T5 whose encoder makes its mask without a mask function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashbias_convert.about import About
from flashbias_convert.causal import key_table
from flashbias_convert.causal_owner import KeyTableOwner, PaddingMaskInGenerate, bound_arguments
from flashbias_convert.fallback import NO_PADDING_MASK, WEIGHTS, say_original, wants_weights
from flashbias_convert.recipe import Owner, Recipe

from .transformers_t5 import T5Attention, describe, is_self_attention

#: keyword argument that an encoder hands through its layers: its mask is one of padding
_FUSED = "flashbias_fused"


class SwitchAttention(T5Attention):
    """`SwitchTransformersAttention` as self-attention."""

    def flashbias_forward(
        self, hidden_states: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        if kwargs.pop(_FUSED, False) and mask is not None:
            mask = key_table(mask[:, 0, 0, :] == 0, mask.device)  # (B, 1, 1, M): 0, or very small
        return super().flashbias_forward(hidden_states, mask, *args, **kwargs)


class SwitchStack(KeyTableOwner):
    """An encoder's mask is of linear size already; a decoder gets a key table instead of one."""

    is_decoder: bool

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_decoder:
            return super().flashbias_forward(*args, **kwargs)
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        mask = call.get("attention_mask")
        padding = mask is None or mask.dim() == 2
        if not padding or wants_weights(self.config, call):
            say_original(WEIGHTS if padding else NO_PADDING_MASK)
            return self.original_forward(*args, **kwargs)
        return self.original_forward(**call, **{_FUSED: True})


_PREFIX = "transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformers"

recipe = Recipe(
    name="transformers_switch",
    title="Switch Transformers (transformers)",
    classes=(f"{_PREFIX}Attention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=SwitchAttention,
    describe=describe,
    owners=(
        Owner((f"{_PREFIX}Stack",), SwitchStack),
        Owner((f"{_PREFIX}ForConditionalGeneration",), PaddingMaskInGenerate),
    ),
    shares=is_self_attention,
    about=About(
        models="Switch Transformers, as T5",
        exact="its bias of the distance: a table of 2 N - 1 numbers a head, made once a call",
    ),
)
