"""Attention in windows: base classes that recipes of the Swin family share."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from .patched_attention import PatchedAttention
from .patched_owner import PatchedOwner
from .tracing import is_traced


class WindowAttention(PatchedAttention):
    """Attention of timm in windows whose size can be set later."""

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        # called for every new input size: with the same window, too, the shift mask may change
        super().set_window_size(window_size)  # type: ignore[misc]
        self.score_bias.mask_memo.doubtful = True


class ShiftedLayer(PatchedOwner):
    """A layer of transformers whose `get_attn_mask` makes the shift mask anew in every call.

    It keeps the mask of the last size of its map: the attention below meets the same tensor again
    and need not compare it anew with the one that it planned for.
    """

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lean():
            return self.original_forward(*args, **kwargs)

    def get_attn_mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """As the original's; the same tensor for the same arguments, which nobody may change."""
        if not self.is_lean or is_traced():
            return _make(self, args, kwargs)
        key = (self.shift_size, self.window_size, args, tuple(kwargs.items()))
        kept = _KEPT.get(self)
        if kept is None or kept[0] != key:
            with torch.inference_mode(False):
                kept = _KEPT[self] = (key, _make(self, args, kwargs))
        return kept[1]


#: the last mask of each layer, and what it was made for; copies of a layer make their own
_KEPT: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, Tensor | None]]
_KEPT = weakref.WeakKeyDictionary()


def _make(layer: ShiftedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    original: Any = layer.original_class
    made: Tensor | None = original.get_attn_mask(layer, *args, **kwargs)
    return made


def is_shifted(layer: Any) -> bool:
    """Whether a layer of transformers rolls its map; backbones do so with a single window, too."""
    return bool(layer.shift_size > 0)


def layer_mask(layer: Any, like: Tensor) -> Tensor | None:
    """The shift mask (nW, N, N) that a layer of transformers makes for the map it was built for.

    Args:
        layer: has `get_attn_mask`; any other module has no mask.
        like: dtype and device of the mask.
    """
    if not hasattr(layer, "get_attn_mask") or not is_shifted(layer):
        return None
    window = layer.window_size
    padded = [math.ceil(size / window) * window for size in layer.input_resolution]
    original = getattr(layer, "original_class", type(layer))
    known = inspect.signature(original.get_attn_mask).parameters
    size = (tuple(padded),) if "input_resolution" in known else padded
    # older versions make it on the CPU or in fp32, and their callers move it
    how = {"dtype": like.dtype, "device": like.device}
    how = {name: value for name, value in how.items() if name in known}
    mask: Tensor | None = layer.get_attn_mask(*size, **how)
    return None if mask is None else mask.to(like)
