"""SAM's attention of any repository: found by its parts, and tried out before it is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert import inspect_model, load_model, patch_model, save_model
from flashbias_convert.recipe import Registry
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised


class Attention(nn.Module):
    """The formula of segment-anything's image encoder, (B, H, W, C) to the same."""

    unscaled = True
    resizes = True

    def __init__(self, dim: int = 32, num_heads: int = 4, use_rel_pos: bool = True, size: int = 3):
        super().__init__()
        self.num_heads, self.use_rel_pos = num_heads, use_rel_pos
        self.scale = (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if use_rel_pos:
            self.rel_pos_h = nn.Parameter(torch.zeros(2 * size - 1, dim // num_heads))
            self.rel_pos_w = nn.Parameter(torch.zeros(2 * size - 1, dim // num_heads))

    def rows(self, n: int, table: Tensor) -> Tensor:
        if self.resizes and len(table) != 2 * n - 1:
            stretched = F.interpolate(table.T.unsqueeze(0), size=2 * n - 1, mode="linear")
            table = stretched.squeeze(0).T
        return torch.stack([table[i : i + n].flip(0) for i in range(n)])

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        heads = self.qkv(x).reshape(batch, height * width, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).flatten(1, 2).unbind(0)
        scores = (self.scale * q) @ k.transpose(1, 2)
        if self.use_rel_pos:
            of = (q if self.unscaled else self.scale * q).unflatten(1, (height, width))
            down = torch.einsum("byxd,ykd->byxk", of, self.rows(height, self.rel_pos_h))
            across = torch.einsum("byxd,xkd->byxk", of, self.rows(width, self.rel_pos_w))
            scores = scores + (down[..., None] + across[:, :, :, None]).flatten(3).flatten(1, 2)
        out = (scores.softmax(-1) @ v).unflatten(0, (batch, -1)).transpose(1, 2)
        return self.proj(out.reshape(batch, height, width, dim))


class Scaled(Attention):
    """Has all the parts, and makes its bias of scaled queries."""

    unscaled = False


class Fixed(Attention):
    """Knows maps of one size only."""

    resizes = False


class Encoder(nn.Module):
    """Windows of 3 x 3 on a map of 6 x 9, then the whole map, on tables for 5 x 5."""

    def __init__(self, kind: type[Attention] = Attention, **settings: Any) -> None:
        super().__init__()
        self.window, self.whole = kind(**settings), kind(size=5, **settings)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unflatten(2, (3, 3)).unflatten(1, (2, 3)).transpose(2, 3)
        out = self.window(windows.flatten(0, 2)).view(windows.shape)
        x = x + out.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        found: Tensor = x + self.whole(x)
        return found


def run(model: nn.Module) -> Tensor:
    made = torch.randn(2, 6, 9, 32, generator=torch.Generator().manual_seed(1))
    out: Tensor = model(made.bfloat16().half().to(next(model.parameters()).dtype))
    return out


CASE = Case(
    lambda: randomised(Encoder(), rel_pos=0.7), run, ("rel_pos_h", "rel_pos_w"), {"patched": 2}
)


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
def test_values(dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASE, dtype, backend)


def test_comes_and_goes() -> None:
    parity.check_comes_and_goes(CASE)


def test_training_is_the_original() -> None:
    parity.check_training(CASE)


def test_other_weights_bring_their_bias() -> None:
    parity.check_follows_weights(CASE)


def test_a_file_loads(tmp_path: Path) -> None:
    model = CASE.make()
    CASE.patched(model)
    save_model(model, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path / "model.safetensors", arch=CASE.make, backend="sdpa")
    assert torch.equal(CASE.output(loaded), CASE.output(model))


def test_the_trial_looks_at_a_small_map() -> None:
    """Scores of SAM's own map would be 4096 x 4096 numbers a head."""
    module = Attention(size=64)
    with parity.NoSquares(2048):
        (site,) = inspect_model(module, force_all=True).sites
    assert site.status == "patched" and (site.n, site.m) == (4096, 4096)


@pytest.mark.parametrize(("kind", "word"), [(Scaled, "something else"), (Fixed, "tried out")])
def test_what_computes_something_else_is_not_trusted(kind: type[Attention], word: str) -> None:
    kind.__name__ = "Attention"
    model = randomised(Encoder(kind), rel_pos=0.7)
    window = torch.randn(2, 3, 3, 32)
    with torch.no_grad():
        before = model.window(window)
        plan = patch_model(model, force_all=True)
        assert plan.counts() == {"unsupported": 2}
        assert all(word in site.reason for site in plan.sites)
        assert torch.equal(model.window(window), before)


def test_without_relative_positions_it_is_left_alone() -> None:
    plan = inspect_model(Encoder(use_rel_pos=False))
    assert plan.counts() == {"left alone": 2} and "no relative positions" in plan.sites[0].reason


@pytest.mark.parametrize("lacking", ["rel_pos_h", "use_rel_pos", "qkv", "scale", "num_heads"])
def test_other_classes_of_the_name_are_nobodys(lacking: str) -> None:
    module = Attention()
    assert Registry().find(module) is not None
    delattr(module, lacking)
    assert Registry().find(module) is None


def test_tables_of_another_size_are_nobodys() -> None:
    module = Attention()
    module.rel_pos_h = nn.Parameter(torch.zeros(5, 7))
    assert Registry().find(module) is None
