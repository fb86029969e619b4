"""Document models of which no whole class can be built here: an encoder, and a reading order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LayoutLMv2Config
from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2Encoder
from transformers.models.pp_doclayout_v2 import (
    configuration_pp_doclayout_v2,
    modeling_pp_doclayout_v2,
)

from .case import drawn
from .given import Inputs, pages
from .parts import Parts, Sizes


class Reader(nn.Module):
    """The encoder of LayoutLMv2, called as its model does, which cannot be built: it wants
    detectron2 for the image.

    Args:
        config: of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.encoder = LayoutLMv2Encoder(config)

    def forward(self, states: Tensor, boxes: Tensor) -> Tensor:
        """States (B, N, C) of N tokens and their boxes (B, N, 4) to states."""
        batch, n = states.shape[:2]
        places = torch.arange(n, device=states.device).expand(batch, n)
        nothing_hidden = states.new_zeros(batch, 1, 1, n)
        found: Tensor = self.encoder(
            states, attention_mask=nothing_hidden, bbox=boxes, position_ids=places
        ).last_hidden_state
        return found


class Order(nn.Module):
    """The scores (B, N, N) of a reading order that count.

    The others are one large number, whose rounding would hide all errors.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, boxes: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.inner(boxes, labels=labels, mask=mask)
        return scores.triu(1)


def parts(s: Sizes) -> Parts:
    """By the names of their rows."""
    boxes, text = (8, 32) if s.tiny else (300, 512)
    layers = s.layers if s.tiny else 6  # few tokens: all layers of the published model
    return {
        f"transformers_layoutlmv2, encoder of base, {s.layers} layers": (
            s.batch, text, lambda: Reader(LayoutLMv2Config(**s.bert())), _states(text, s.dim),
        ),
        f"transformers_pp_doclayout, reading order, {layers} layers": (
            s.batch, boxes + 2, lambda: _order(s.tiny, layers), _boxes(boxes),
        ),
    }  # fmt: skip


def _order(tiny: bool, layers: int) -> nn.Module:
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32,
             "coordinate_size": 5, "shape_size": 6, "global_pointer_head_size": 8}  # fmt: skip
    sizes: dict[str, Any] = {"num_hidden_layers": layers, **(small if tiny else {})}
    config = configuration_pp_doclayout_v2.PPDocLayoutV2ReadingOrderConfig(**sizes)
    model: Any = modeling_pp_doclayout_v2.PPDocLayoutV2ReadingOrder(config)
    for module in model.modules():  # fresh weights hide what attention adds
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    nn.init.normal_(model.encoder.rel_bias_module.pos_proj.weight)
    return Order(model)


def _states(n: int, width: int) -> Inputs:
    """States of tokens with boxes."""

    def make(count: int, device: torch.device, dtype: torch.dtype) -> Any:
        _, given = pages(n, 10)(count, device, dtype)
        return (drawn((n, width), count).to(device, dtype), given["bbox"]), {}

    return make


def _boxes(n: int) -> Inputs:
    """Boxes, whose corners every dtype holds, with labels and a mask of ones."""

    def make(count: int, device: torch.device, dtype: torch.dtype) -> Any:
        (labels,), given = pages(n, 20)(count, device, dtype)
        corners = (given["bbox"] // 4).to(dtype)
        return (corners,), {"labels": labels, "mask": torch.ones_like(labels)}

    return make
