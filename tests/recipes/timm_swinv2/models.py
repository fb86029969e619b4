"""A small SwinV2 of timm with weights at which everything matters, and its comparison."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import Plan, patch_model, unpatch_model
from tests.support import Nearby, assert_parity, nudged

swin = pytest.importorskip("timm.models.swin_transformer_v2")


def randomise(model: nn.Module) -> None:
    """Weights at which the bias, the scales and the attention itself all matter.

    As built, the norms after the attention are zero, the bias is flat and all heads are alike.
    """
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
        if isinstance(module, swin.WindowAttention):
            nn.init.normal_(module.cpb_mlp[0].weight)
            nn.init.normal_(module.cpb_mlp[0].bias)
            nn.init.normal_(module.cpb_mlp[2].weight, 0, 0.1)
            nn.init.uniform_(module.logit_scale, 0.5, 5.0)  # on both sides of the clamp
            nn.init.normal_(module.qkv.weight, 0, 0.2)
            if module.q_bias is not None:
                nn.init.normal_(module.q_bias)
                nn.init.normal_(module.v_bias)


def make(separate: bool = False, **changes: Any) -> Any:
    """A small model in eval mode: windows of 8 on maps of 16 and 8, one of them shifted."""
    arguments: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": (2, 1),
        "num_heads": (2, 4),
        "window_size": 8,
        "num_classes": 5,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = swin.SwinTransformerV2(**{**arguments, **changes})
        randomise(model)
    for module in model.modules():
        if isinstance(module, swin.WindowAttention):
            module.qkv_bias_separate = separate
    return model.eval()


def image(height: int = 32, width: int = 32, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, height, width, generator=generator)


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    """Features (B, h, w, C): many more numbers than logits, and errors of theirs stand out."""
    out: Tensor = model.forward_features(x)  # type: ignore[operator]
    return out


def true_output(model: nn.Module, x: Tensor) -> Tensor:
    """What the original computes in float64 from the same weights and buffers."""
    wide = copy.deepcopy(model)
    unpatch_model(wide)
    return run(wide.double(), x.double())


def nearby(model: nn.Module, x: Tensor) -> Nearby:
    """For `assert_parity`, of the original."""

    def draw(number: int) -> tuple[Tensor, Tensor]:
        twin = nudged(model, number)
        unpatch_model(twin)
        return run(twin, x), true_output(twin, x)

    return draw


def patch(model: nn.Module, **options: Any) -> Plan:
    return patch_model(model, **{"method": "exact", "backend": "sdpa", **options})


def check_model(model: nn.Module, x: Tensor, **options: Any) -> Plan:
    """Patch the model and compare it with itself before."""
    plain, truth = run(model, x), true_output(model, x)
    plan = patch(model, **options)
    assert plan.counts() == {"patched": len(plan.sites)}
    assert_parity(run(model, x), plain, truth, nearby=nearby(model, x))
    return plan


def shifted_block(**changes: Any) -> tuple[Any, Any, Any]:
    """A model, its shifted block, and that block's attention."""
    model = make(**changes)
    block = model.layers[0].blocks[1]
    assert any(block.shift_size)
    return model, block, block.attn


def window_tokens(windows: int = 8, tokens: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(windows, tokens, 32, generator=generator)


def check_attention(attn: Any, mask: Tensor | None, rows: Any = slice(None)) -> None:
    """Compare a patched attention with its original on the given windows of 8."""
    x = window_tokens()
    plain = copy.deepcopy(attn)
    unpatch_model(plain)
    with torch.no_grad():
        truth = copy.deepcopy(plain).double()(x.double(), None if mask is None else mask.double())
        assert_parity(attn(x, mask)[rows], plain(x, mask)[rows], truth[rows])
