"""MaxViT and MViTv2 of torchvision, patched, against the originals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model
from flashbias_convert.built_terms import axial_rows_3d
from tests.recipes import model_parity
from tests.recipes.model_parity import PATHS, randomised
from tests.recipes.parity import CHECKS, ONCE, Case, check_compiled

maxvit = pytest.importorskip("torchvision.models.maxvit")
mvit = pytest.importorskip("torchvision.models.video.mvit")


def make_maxvit() -> nn.Module:
    model: nn.Module = maxvit.MaxVit(
        input_size=(32, 32), stem_channels=8, partition_size=4, block_channels=[16, 32],
        block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0, num_classes=5,
    )  # fmt: skip
    return model


MAXVIT = Case("MaxViT", make_maxvit, sites=4)


@pytest.mark.parametrize("check", [*CHECKS, *ONCE])
def test_maxvit(check: Callable[[Case], None]) -> None:
    check(MAXVIT)


def test_its_attention_compiles_into_one_graph() -> None:
    attention = maxvit.RelativePositionalMultiHeadAttention(16, 8, 16)
    check_compiled(Case("MaxViT", lambda: attention, (2, 3, 16, 16), sites=1))


# -- MViTv2 --------------------------------------------------------------------------------


def make_mvit(rel_pos: bool = True, cls_residual: bool = False, **sizes: Any) -> Any:
    """A video of 4 frames of 32 x 32: 2 x 8 x 8 patches, whose queries are pooled in layer 1."""
    config = [
        mvit.MSBlockConfig(
            num_heads=heads, input_channels=inner, output_channels=outer, kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3], stride_q=[1, *stride_q], stride_kv=[1, *stride_kv],
        )
        for heads, inner, outer, stride_q, stride_kv in (
            (2, 16, 16, (1, 1), (4, 4)), (2, 16, 32, (2, 2), (2, 2))
        )
    ]  # fmt: skip
    model = mvit.MViT(
        **{"spatial_size": (32, 32), "temporal_size": 4, **sizes}, block_setting=config,
        residual_pool=True, residual_with_cls_embed=cls_residual, rel_pos_embed=rel_pos,
        proj_after_attn=True, num_classes=5, stochastic_depth_prob=0.0,
    )  # fmt: skip
    return randomised(model, rel_pos=1.5)


def video(model: Any, frames: int = 4, side: int = 32) -> Tensor:
    """All tokens: the head looks at the class token alone, whose scores have no bias."""
    made = torch.randn(2, 3, frames, side, side, generator=torch.Generator().manual_seed(1))
    found: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda *call: found.append(call[2]))
    model(made.bfloat16().half().to(next(model.parameters()).dtype))
    hook.remove()
    return found[0]


MVIT = {
    name: model_parity.Case(make, video, ("rel_pos_h", "rel_pos_w", "rel_pos_t"), {"patched": 2})
    for name, make in (
        ("mvit", make_mvit),
        ("mvit, shortcut of the class token", lambda: make_mvit(cls_residual=True)),
        ("mvit, tables of another size", lambda: resized(make_mvit())),
    )
}


def resized(model: Any) -> Any:
    """Tables for a map of another size, which the original interpolates in each call."""
    for block in model.blocks:
        for axis in "thw":
            table = getattr(block.attn, f"rel_pos_{axis}")
            size = (2 * len(table) + 1, table.shape[1])
            made = torch.randn(size, generator=torch.Generator().manual_seed(2))
            setattr(block.attn, f"rel_pos_{axis}", nn.Parameter(made))
    return model


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", MVIT)
def test_mvit_values(name: str, dtype: torch.dtype, backend: str) -> None:
    model_parity.check_values(MVIT[name], dtype, backend)


def test_mvit_comes_and_goes() -> None:
    model_parity.check_comes_and_goes(MVIT["mvit"])


def test_training_is_the_original() -> None:
    model_parity.check_training(MVIT["mvit"])


def test_other_weights_bring_their_bias() -> None:
    model_parity.check_follows_weights(MVIT["mvit"])


def test_sizes_of_a_call() -> None:
    """17 frames and places are 9 after a stride of 2, or 5 after one of 4."""
    plan = inspect_model(make_mvit(), force_all=True)
    assert [(s.n, s.m) for s in plan.sites] == [(2 * 64 + 1, 2 * 4 + 1), (2 * 16 + 1, 2 * 16 + 1)]


def test_the_first_version_has_no_relative_positions() -> None:
    plan = inspect_model(make_mvit(rel_pos=False))
    assert plan.counts() == {"left alone": 2}
    assert all("no relative positions" in site.reason for site in plan.sites)


@pytest.mark.parametrize("special", [0, 2])
def test_rows_of_three_axes(special: int) -> None:
    """Against the sum over the axes, written out."""
    sizes, keys, generator = (2, 3, 4), (3, 2, 5), torch.Generator().manual_seed(3)
    q = torch.randn(2, 2, special + 24, 6, generator=generator)
    tables = {
        f"rel_{axis}": torch.randn(n, m, 6, generator=generator)
        for axis, n, m in zip("thw", sizes, keys, strict=True)
    }
    found = axial_rows_3d(q=q, special=special, **tables).dense(special + 24, special + 30)
    grid = q[:, :, special:].unflatten(2, sizes)
    parts = [
        torch.einsum("bhtyxd,tkd->bhtyxk", grid, tables["rel_t"])[..., :, None, None],
        torch.einsum("bhtyxd,ykd->bhtyxk", grid, tables["rel_h"])[..., None, :, None],
        torch.einsum("bhtyxd,xkd->bhtyxk", grid, tables["rel_w"])[..., None, None, :],
    ]
    expected = sum(parts[1:], parts[0]).flatten(5).flatten(2, 4)
    torch.testing.assert_close(found[:, :, special:, special:], expected, rtol=1e-5, atol=1e-5)
    assert not found[:, :, :special].any() and not found[..., :special].any()
