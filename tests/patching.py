"""The toy model, patched: what tests of patching do with it."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert import Plan, patch_model
from tests.toy import TOY, ToyModel, make_input, make_model

ATTN = ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]


def patch(model: nn.Module, **options: Any) -> Plan:
    return patch_model(model, **{"recipes": [TOY], "method": "exact", "backend": "sdpa", **options})


def patched_model(seed: int = 0, **options: Any) -> ToyModel:
    """A toy model, patched."""
    model = make_model(seed=seed)
    patch(model, **options)
    return model


@torch.no_grad()
def run(model: nn.Module, x: Tensor | None = None) -> Tensor:
    out: Tensor = model(make_input() if x is None else x)
    return out


def attention(model: nn.Module, block: int = 0) -> Any:
    return model.get_submodule(ATTN[block])


def change_table(model: nn.Module, block: int = 0) -> None:
    with torch.no_grad():
        attention(model, block).table.mul_(-1)


def by_torch(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
