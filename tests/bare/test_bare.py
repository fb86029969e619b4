"""Biases of tensors alone are those that the libraries' own modules add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flashbias_convert import inspect_model
from flashbias_convert.bare import BareAttention, Sizes, bare_model, parse_window
from flashbias_convert.checkpoint.bare import open_bare
from flashbias_convert.checkpoint.read import read_checkpoint
from flashbias_convert.errors import UnknownArchitectureError, UsageError
from flashbias_convert.recipe import Description, Registry, Site
from flashbias_convert.views import site_views
from tests.recipes.parity import randomise


def bare_of(tensors: dict[str, Tensor], *window: int) -> nn.Module:
    found = bare_model(tensors, Sizes(window))
    assert found is not None
    return found


def described(model: nn.Module, name: str, tokens: int | None = None) -> Description:
    module = model.get_submodule(name)
    recipe = Registry().find(module)
    assert recipe is not None
    with torch.no_grad():
        return recipe.describe(Site(name, module, model, tokens))


def sites(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, BareAttention)]


def swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=32, patch_size=2, window_size=(4, 8), embed_dim=16, depths=(1, 1),
        num_heads=(1, 2), num_classes=3, strict_img_size=False, always_partition=True,
    )  # fmt: skip


def square_swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,),
        num_classes=3,
    )  # fmt: skip


def swinv2() -> nn.Module:
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    return SwinTransformerV2(
        img_size=32, patch_size=2, window_size=8, embed_dim=16, depths=(1, 1), num_heads=(1, 2),
        num_classes=3,
    )  # fmt: skip


def beit() -> nn.Module:
    from timm.models.beit import Beit

    return Beit(
        img_size=12, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3,
        use_rel_pos_bias=True,
    )  # fmt: skip


def pangu() -> nn.Module:
    from flashbias_convert.models.pangu import EarthAttention3D

    return nn.ModuleDict({"attention": EarthAttention3D(16, 2, (2, 6, 12), 3)})


CASES: list[tuple[Any, tuple[int, ...]]] = [
    (square_swin, ()),
    (swin, (4, 8)),
    (swinv2, (8,)),
    (beit, ()),
    (pangu, ()),
]


@pytest.mark.parametrize(("make", "window"), CASES)
def test_they_are_those_of_the_library(make: Any, window: tuple[int, ...]) -> None:
    model = make().double().eval()
    randomise(model)
    # timm makes the coordinates of SwinV2 in float32, whatever the layers compute in
    made = {n: b for n, b in model.named_buffers() if "coords_table" in n}
    bare = bare_of({**model.state_dict(), **made}, *window)
    names = [n for n, m in model.named_modules() if Registry().find(m) is not None]
    assert sites(bare) == names
    for name in names:
        theirs, own = described(model, name), described(bare, name)
        assert theirs.bias is not None and own.bias is not None and own.bias.dtype == torch.float64
        torch.testing.assert_close(own.bias, theirs.bias, rtol=0, atol=1e-12)
        assert (own.num_heads, own.n, own.m) == (theirs.num_heads, theirs.n, theirs.m)
        assert own.head_dim == theirs.head_dim
        assert own.index is not None and theirs.index is not None
        # any index will do that tells the same cells apart
        pairs = torch.stack([own.index.flatten(), theirs.index.flatten()], dim=1).unique(dim=0)
        assert len(pairs) == len(pairs[:, 0].unique()) == len(pairs[:, 1].unique())


def test_coordinates_in_the_file_show_the_window() -> None:
    models = pytest.importorskip("torchvision.models.swin_transformer")
    attention = models.ShiftedWindowAttentionV2(16, [4, 8], [0, 0], 2).double().eval()
    bare = bare_of({f"a.{k}": v for k, v in attention.state_dict().items()})
    with torch.no_grad():
        theirs = attention.get_relative_position_bias()[0]
    own = described(bare, "a").bias
    assert own is not None and torch.equal(own, theirs)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_distances_of_t5(side: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    ).eval()
    bare = bare_of(model.state_dict())
    name = f"{side}.block.0.layer.0.SelfAttention"
    assert sites(bare) == [f"{s}.block.0.layer.0.SelfAttention" for s in ("decoder", "encoder")]
    module: Any = model.get_submodule(name)
    found = described(bare, name, tokens=300)
    with torch.no_grad():
        theirs = module.compute_bias(300, 300)[0]
    if side == "encoder":
        assert found.bias is not None and torch.equal(found.bias, theirs)
    else:
        (term,) = found.exact_terms
        assert found.bias is None and torch.equal(term.dense(300, 300), theirs)


def test_it_is_planned_and_looked_at_like_a_model() -> None:
    model = swinv2().eval()
    randomise(model)
    bare = bare_of(model.state_dict(), 8)
    theirs = inspect_model(model, method="svd", force_all=True)
    plan = inspect_model(bare, method="svd", force_all=True)
    assert [s.name for s in plan.patched] == [s.name for s in theirs.sites]
    assert [s.heads for s in plan.sites] == [1, 2] and all(s.ranks() for s in plan.sites)
    assert all("nothing in the file shows it" in s.warnings[0] for s in plan.sites)
    views = list(site_views(bare, plan))
    assert all(v.bias is not None and v.approximation is not None for v in views)


def test_half_precision_is_widened() -> None:
    table = {"relative_position_bias_table": torch.randn(49, 2).half()}
    found = described(bare_of(table), "")
    assert found.bias is not None and found.bias.dtype == torch.float32


def test_what_no_tensor_shows_is_asked_for() -> None:
    layers = {k: v for k, v in swinv2().state_dict().items() if "cpb_mlp" in k}
    with pytest.raises(UsageError, match=r"no tensor of layers.0.* shows its window.*--window 16"):
        inspect_model(bare_of(layers))
    odd = bare_of({"a.relative_position_bias_table": torch.zeros(50, 2)})
    (site,) = inspect_model(odd).sites
    assert site.status == "unsupported" and "no square window" in site.reason


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.relative_position_bias_table": torch.zeros(3)},
        {"a.earth_specific_bias": torch.zeros(2, 2)},
        {"a.earth_position_bias_table": torch.zeros(9, 1, 2)},
        {"a.relative_attention_bias.weight": torch.zeros(2, 2)},
        {"a.cpb_mlp.0.weight": torch.zeros(4, 2), "a.cpb_mlp.2.weight": torch.zeros(2, 5)},
        {"a.cpb_mlp.0.weight": torch.zeros(4, 2)},
    ],
)
def test_tensors_of_other_shapes_are_left_alone(tensors: dict[str, Tensor]) -> None:
    (site,) = inspect_model(bare_of(tensors, 4)).sites
    assert site.status == "unsupported" and site.reason


def test_an_index_that_points_outside_its_table_is_not_used() -> None:
    table, index = torch.randn(9, 1), torch.full((4, 4), 9)
    found = {"relative_position_bias_table": table, "relative_position_index": index}
    bias = described(bare_of(found), "").bias
    plain = described(bare_of({"relative_position_bias_table": table}), "").bias
    assert bias is not None and plain is not None and torch.equal(bias, plain)


def test_nothing_but_the_tensors_of_biases_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.relative_position_bias_table": torch.randn(49, 2)}, path)
    small = read_checkpoint(path)
    big = torch.zeros(1, dtype=torch.float32, device="meta").expand(1 << 20, 1 << 20)
    small.tensors["a.mlp.weight"] = big  # whoever reads it fails
    opened = open_bare(small)
    assert inspect_model(opened.model).patched
    small.tensors.pop("a.relative_position_bias_table")
    with pytest.raises(UnknownArchitectureError, match=r"no tensor of .* looks like"):
        open_bare(small)


@pytest.mark.parametrize(
    ("text", "sides"), [("16", (16,)), ("8x4", (8, 4)), ("2x6x12", (2, 6, 12))]
)
def test_windows_in_words(text: str, sides: tuple[int, ...]) -> None:
    assert parse_window(text) == sides


@pytest.mark.parametrize("text", ["", "0", "-4", "4x", "1x2x3x4", "4x0", "4,4", "٤"])
def test_windows_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="a window is a size such as 16"):
        parse_window(text)
