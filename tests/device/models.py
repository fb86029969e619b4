"""Tiny models of several kinds, and the calls that they take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.checkpoint.architecture import Architecture
from flashbias_convert.swap import patched_modules
from tests.checkpoint.models import ARGS, NAME, images, tiny_model
from tests.recipes.alibi.models import make
from tests.recipes.test_transformers_distance import t5, tokens
from tests.toy import TOY, make_input, make_model


@dataclass(frozen=True)
class Case:
    """A model and one call of it.

    Attributes:
        make: the model on the CPU, in eval mode, always the same weights.
        call: keyword arguments or one tensor, on the CPU.
        recipes: beside the installed ones.
        arch: what `save_model` has to be told.
    """

    make: Callable[[], Any]
    call: Callable[[], Any]
    recipes: tuple[Any, ...] = ()
    arch: Any = None
    method: dict[str, Any] = field(default_factory=lambda: {"method": "svd", "energy": 0.9})


def _ids() -> Tensor:
    return torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))


def padded(side: str = "right") -> dict[str, Tensor]:
    """Tokens, five of which are padding."""
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, -5:] = 0
    return {"input_ids": _ids(), "attention_mask": mask if side == "right" else mask.flip(-1)}


CASES = {
    "toy": Case(make_model, make_input, (TOY,), make_model),
    "swin": Case(tiny_model, lambda: images(16), (), Architecture("timm", NAME, ARGS)),
    "bloom": Case(lambda: make("bloom"), padded),
    "gpt2": Case(lambda: make("gpt2"), padded),
    "t5": Case(
        lambda: t5("t5").eval(),
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(n=11, seed=2)},
    ),
}


def on(device: torch.device, call: Any, dtype: torch.dtype | None = None) -> Any:
    """A call whose tensors are on a device, those of floating point in a dtype."""
    if isinstance(call, dict):
        return {name: on(device, value, dtype) for name, value in call.items()}
    return call.to(device, dtype if call.is_floating_point() else None)


def plainly(model: Any, device: torch.device) -> Any:
    """A copy on a device whose attention is computed by its plainest backend there."""
    copied = copy.deepcopy(model).to(device)
    for site in patched_modules(copied):
        site.score_bias.backend = "eager"
    return copied


@torch.no_grad()
def outputs(model: nn.Module, call: Any) -> Tensor:
    """What a model makes of a call."""
    out = model(**call) if isinstance(call, dict) else model(call)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    if isinstance(call, dict) and "attention_mask" in call:
        return found[call["attention_mask"].bool()]
    return found
