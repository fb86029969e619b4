"""Classes that recipes find by their parts, as packages have them that copied them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

SWIN: dict[str, Any] = {"img_size": 16, "window_size": 4, "upscale": 2, "upsampler": "pixelshuffle"}


def made(path: str, name: str, **settings: Any) -> nn.Module:
    """A model of a package; skips where that is not installed."""
    package = path.partition(".")[0]
    pytest.importorskip(package, exc_type=ImportError)  # some lack what they need themselves
    model: nn.Module = getattr(importlib.import_module(path), name)(**settings)
    return randomised(model, rel_pos=0.7, relative_position_bias_table=0.7)


def sam() -> nn.Module:
    return made(
        "segment_anything.modeling.image_encoder", "ImageEncoderViT", img_size=32, patch_size=4,
        embed_dim=32, depth=2, num_heads=4, out_chans=8, use_rel_pos=True, window_size=3,
        global_attn_indexes=(1,),
    )  # fmt: skip


def swin_ir() -> nn.Module:
    return made(
        "spandrel.architectures.SwinIR", "SwinIR", embed_dim=12, depths=[2, 2], num_heads=[2, 2],
        **SWIN,
    )  # fmt: skip


def swin2_sr() -> nn.Module:
    return made(
        "spandrel.architectures.Swin2SR", "Swin2SR", embed_dim=12, depths=[2], num_heads=[2], **SWIN
    )


def hat() -> nn.Module:
    return made(
        "spandrel.architectures.HAT", "HAT", embed_dim=60, depths=(2,), num_heads=(2,),
        compress_ratio=3, squeeze_factor=10, overlap_ratio=0.5, **SWIN,
    )  # fmt: skip


def beats() -> nn.Module:
    path = "speechbrain.lobes.models.beats"
    pytest.importorskip(path, exc_type=ImportError)
    file = importlib.import_module(path)
    config = file.BEATsConfig(
        {
            "encoder_layers": 2, "encoder_embed_dim": 24, "encoder_ffn_embed_dim": 16,
            "encoder_attention_heads": 3, "conv_pos": 4, "conv_pos_groups": 2, "num_buckets": 16,
            "max_distance": 20, "relative_position_embedding": True, "gru_rel_pos": True,
            "deep_norm": True,
        }
    )  # fmt: skip
    model: nn.Module = file.TransformerEncoder(config)
    return randomised(model, std=0.3, relative_attention_bias=2.0, grep_a=1.0, grep_linear=1.0)


def hear(model: nn.Module) -> Tensor:
    """Frames, some of them padding."""
    x = torch.randn(2, 23, 24, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(2, 23, dtype=torch.bool)
    hidden[0, -7:] = True
    out = model(x.bfloat16().half().to(next(model.parameters()).dtype), padding_mask=hidden)[0]
    found: Tensor = out[~hidden]
    return found


def run(side: int) -> Callable[[nn.Module], Tensor]:
    x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))

    def call(model: nn.Module) -> Tensor:
        out: Tensor = model(x.bfloat16().half().to(next(model.parameters()).dtype))
        return out

    return call


TABLE = ("relative_position_bias_table",)
CASES = {
    "SAM": Case(sam, run(32), ("rel_pos_h", "rel_pos_w"), {"patched": 2}),
    "SwinIR": Case(swin_ir, run(16), TABLE, {"patched": 4}, {"method": "exact"}),
    "HAT": Case(hat, run(16), TABLE, {"patched": 3}, {"method": "exact"}),
    "BEATs": Case(beats, hear, ("relative_attention_bias.weight",), {"patched": 2}),
    "Swin2SR": Case(swin2_sr, run(16), ("cpb_mlp.2.weight",), {"patched": 2}, {"method": "exact"}),
}


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.compare(CASES[name], dtype, backend)


@pytest.mark.parametrize("name", CASES)
def test_comes_and_goes(name: str) -> None:
    parity.check_comes_and_goes(CASES[name], pickles=name != "BEATs")  # its weight norm is not
    parity.check_training(CASES[name], together=name == "BEATs")


@pytest.mark.parametrize("name", [name for name in CASES if name != "BEATs"])
def test_a_file_loads(name: str, tmp_path: Path) -> None:
    parity.check_file(CASES[name], tmp_path)
