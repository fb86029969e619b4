"""Owners of language models: the padding mask goes through them as a key table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .causal import check_padding, key_table, own_cache
from .fallback import NO_PADDING_MASK, WEIGHTS, say_original, wants_weights
from .patched_owner import PatchedOwner


class KeyTableOwner(PatchedOwner):
    """A model whose forward makes a mask (B, 1, N, M) from a padding mask (B, M).

    It hands on a key table instead. Its original forward runs, masks and all, for a mask that is
    not a padding mask and for a call that asks for attention weights, and says so once.
    """

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        mask, inputs = call.get("attention_mask"), _inputs(call)
        padding = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
        if inputs is None or not padding or self._returns_weights(call):
            say_original(WEIGHTS if padding else NO_PADDING_MASK)
            return self.original_forward(*args, **kwargs)
        cache = call.get("cache", call.get("past_key_values"))
        check_padding(mask, inputs.shape[0], inputs.shape[1], cache)
        call["attention_mask"] = key_table(mask, inputs.device)
        with self.lean():
            return self.original_forward(**call)

    def _returns_weights(self, call: Mapping[str, Any]) -> bool:
        return wants_weights(self.config, call)


class CausalOwner(KeyTableOwner):
    """A decoder whose forward makes a causal mask (B, 1, N, M) from a padding mask (B, M)."""


class PaddingMaskInGenerate(PatchedOwner):
    """A model with `generate`, which would make masks (B, 1, N, M) for static caches itself."""

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_forward(*args, **kwargs)

    def create_masks_for_generate(
        self,
        *,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor | None:
        """The padding mask, as long as the cache, so that its shape stays from step to step."""
        cache = past_key_values if cache is None else cache
        if attention_mask is None or attention_mask.dim() != 2 or cache is None:
            return attention_mask
        length = own_cache(cache).get_mask_sizes(inputs_embeds.shape[1], 0)[0]
        return F.pad(attention_mask, (0, max(0, length - attention_mask.shape[-1])))


def _inputs(call: Mapping[str, Any]) -> Tensor | None:
    found = call.get("inputs_embeds")
    return call.get("input_ids") if found is None else found


def bound_arguments(
    forward: Callable[..., Any], module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, wherever they were given; without `module` itself."""
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    named.pop(next(iter(bound.signature.parameters)))
    return named
