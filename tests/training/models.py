"""Models whose terms are trained, for the tests here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert import Plan, patch_model
from tests.toy import TOY, ToyModel, make_input, make_model


def undropped(depth: int = 2) -> ToyModel:
    """The toy model without dropout of attention weights."""
    model = make_model(depth)
    for block in model.blocks:
        block["attn"].attn_drop.p = 0.0  # type: ignore[index]
    return model


def train_terms(model: nn.Module, **options: Any) -> Plan:
    """Patch it with factors that are parameters."""
    asked = {"recipes": [TOY], "method": "svd", "energy": 0.9, "backend": "eager", **options}
    return patch_model(model, train="terms", **asked)


def trained(steps: int = 2, fused: bool = False, **options: Any) -> ToyModel:
    """A toy model whose terms have left their decomposition behind, in eval mode."""
    model = undropped()
    train_terms(model, **options)
    return step(model, steps, fused)


def step(model: Any, steps: int = 1, fused: bool = False) -> Any:
    """Train everything that asks for gradients, and go back to eval mode."""
    model.train()
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=0.05, fused=fused)
    for _ in range(steps):
        optimizer.zero_grad()
        model(make_input()).square().mean().backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    out: Tensor = model(make_input())
    return out


def attention(model: nn.Module, block: int = 0) -> Any:
    return model.get_submodule(f"blocks.{block}.attn")


def terms(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the terms by their names in the model."""
    return {k: v for k, v in model.state_dict().items() if ".score_bias.low_rank." in k}
