"""PhysicsNeMo's earth attention, patched, against the original with random weights.

The library itself is seldom installed; a stand-in with its layout of heads and windows always
runs.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    Plan,
    inspect_model,
    load_model,
    patch_model,
    save_model,
    unpatch_model,
)
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.models.pangu import earth_position_index
from flashbias_convert.recipe import Registry
from flashbias_convert.recipes.physicsnemo_pangu import MODULES, recipe
from flashbias_convert.terms import Regions, RelativeTable
from tests.support import assert_parity

WINDOW = (2, 3, 4)
#: Levels, latitudes and longitudes of the stand-in's map: 2 x 2 window types, 3 longitudes.
MAP = (4, 6, 12)


class StandIn(nn.Module):
    """Attention with a table (entries, T, H), heads before window types."""

    def __init__(self, dim: int = 16, heads: int = 2, qk_scale: float | None = None) -> None:
        super().__init__()
        self.dim, self.num_heads, self.window_size = dim, heads, WINDOW
        self.scale = qk_scale or (dim // heads) ** -0.5
        types = MAP[0] // WINDOW[0] * (MAP[1] // WINDOW[1])
        self.earth_position_bias_table = nn.Parameter(torch.randn(36 * 7, types, heads))
        self.register_buffer("earth_position_index", earth_position_index(WINDOW))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(3, 0, 4, 1, 2, 5)
        scores = (q * self.scale) @ k.mT  # (B * nLon, H, T, N, N)
        scores = scores + self.earth_position_bias_table[self.earth_position_index].permute(
            3, 2, 0, 1
        )
        if mask is not None:
            by_longitude = scores.unflatten(0, (-1, len(mask)))
            scores = (by_longitude + mask.unsqueeze(1)).flatten(0, 1)
        out = self.attn_drop(self.softmax(scores)) @ v
        return self.proj_drop(self.proj(out.permute(0, 2, 3, 1, 4).flatten(3)))


class StandInBlock(nn.Module):
    """Keeps a mask that is cut along longitude, too, as a buffer."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        self.attn = StandIn()
        ids = torch.randint(3, (3, 4, 24))
        apart = ids[..., :, None] != ids[..., None, :]
        mask = torch.zeros(3, 4, 24, 24).masked_fill(apart, -100.0)
        self.register_buffer("attn_mask", mask if shifted else None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attn(x, self.attn_mask)
        return out


STAND_IN = dataclasses.replace(recipe, classes=(f"{__name__}.StandIn",))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(StandInBlock(False), StandInBlock(True)).eval()


def patch(model: nn.Module, **options: Any) -> Plan:
    defaults = {"method": "exact", "backend": "sdpa", "recipes": (STAND_IN,)}
    return patch_model(model, **{**defaults, **options})


@torch.no_grad()
def check_model(model: nn.Module, x: Tensor, **options: Any) -> Plan:
    """Patch the model and compare it with itself before."""
    plain, truth = model(x), copy.deepcopy(model).double()(x.double())
    plan = patch(model, **options)
    assert plan.counts() == {"patched": len(plan.sites)}
    assert_parity(model(x), plain, truth)
    return plan


def windows(dtype: torch.dtype = torch.float32) -> Tensor:
    """Two fields in windows: (2 * 3, 4, 24, 16)."""
    return torch.randn(6, 4, 24, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_patched_model_equals_the_original(dtype: torch.dtype, backend: str) -> None:
    check_model(make().to(dtype), windows(dtype), backend=backend)


def test_the_terms_are_the_table_and_the_regions() -> None:
    model = make()
    plan = check_model(model, windows())
    assert [site.terms() for site in plan.sites] == [
        ("relative_table",),
        ("relative_table", "regions"),
    ]
    table, ids = plan.sites[1].bias.terms  # type: ignore[union-attr]
    assert isinstance(table, RelativeTable) and table.table.shape == (4, 2, 252)
    assert isinstance(ids, Regions) and ids.ids.shape == (3, 4, 24)
    assert torch.equal(ids.dense(24, 24).squeeze(2), model[1].attn_mask)  # type: ignore[index]


def test_a_scale_of_ones_own_is_used() -> None:
    torch.manual_seed(0)
    check_model(StandIn(qk_scale=0.8).eval(), windows())


@pytest.mark.parametrize("options", [{"method": "exact"}, {"method": "svd", "energy": 0.999}])
def test_a_converted_file_computes_what_the_patched_model_does(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = make()
    patch(model, **options, max_attention_error=1.0)
    file = tmp_path / "model.safetensors"
    save_model(model, file, arch=make, recipes=(STAND_IN,))
    loaded = load_model(file, arch=make, recipes=(STAND_IN,), backend="sdpa")
    with torch.no_grad():
        assert torch.equal(loaded(windows()), model(windows()))


def change_table(attn: Any) -> None:
    with torch.no_grad():
        attn.earth_position_bias_table[0, 0, 0] += 1


def change_index(attn: Any) -> None:
    attn.earth_position_index.copy_(attn.earth_position_index.T.clone())


@pytest.mark.parametrize("change", [change_table, change_index])
def test_terms_of_another_bias_are_refused(change: Any) -> None:
    model: Any = make()
    patch(model)
    change(model[0].attn)
    with pytest.raises(StaleTermsError, match="have changed"), torch.no_grad():
        model(windows())


def test_unpatching_gives_the_original_back() -> None:
    model: Any = make()
    with torch.no_grad():
        plain = model(windows())
        patch(model)
        assert unpatch_model(model) == 2 and type(model[0].attn) is StandIn
        assert torch.equal(model(windows()), plain)


def test_an_index_outside_the_table_fails_its_site() -> None:
    model: Any = make()
    model[0].attn.earth_position_index[3, 3] = 252
    plan = inspect_model(model, method="exact", recipes=(STAND_IN,))
    assert [site.status for site in plan.sites] == ["failed", "patched"]
    assert "reaches from 0 to 252" in plan.sites[0].reason


def test_the_class_names_of_all_versions_lead_here() -> None:
    names = Registry().class_names()
    assert set(recipe.classes) <= set(names) and len(recipe.classes) == 6


# -- the library -----------------------------------------------------------------------------


def library() -> ModuleType:
    """The module with PhysicsNeMo's blocks, of whatever version is installed."""
    for name in MODULES:
        try:
            return importlib.import_module(name.replace("attention_layers", "transformer_layers"))
        except ImportError:
            continue
    pytest.skip("nvidia-physicsnemo is not installed")


def real_block(dims: int, shifted: bool) -> Any:
    """A block of PhysicsNeMo on a map that its windows do not fill."""
    layers = library()
    resolution, window = ((3, 8, 12), WINDOW) if dims == 3 else ((8, 12), WINDOW[1:])
    shift = tuple(w // 2 if shifted else 0 for w in window)
    cls = layers.Transformer3DBlock if dims == 3 else layers.Transformer2DBlock
    torch.manual_seed(0)
    block = cls(16, resolution, 2, window, shift, qk_scale=0.5).eval()
    nn.init.normal_(block.attn.earth_position_bias_table)
    nn.init.normal_(block.attn.qkv.weight, 0, 0.3)
    return block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_blocks_of_the_library(dims: int, shifted: bool, dtype: torch.dtype) -> None:
    block = real_block(dims, shifted)
    tokens = math.prod(block.input_resolution)
    plan = check_model(block.to(dtype), torch.randn(2, tokens, 16).to(dtype), recipes=())
    kinds = ("relative_table", "regions") if shifted else ("relative_table",)
    assert [site.terms() for site in plan.sites] == [kinds]


@pytest.mark.parametrize("dims", [2, 3])
def test_the_stand_in_computes_what_the_library_does(dims: int) -> None:
    attn = real_block(dims, True).attn
    ours = StandIn(qk_scale=0.5)
    ours.window_size = attn.window_size
    ours.earth_position_bias_table = attn.earth_position_bias_table
    ours.earth_position_index = attn.earth_position_index
    ours.load_state_dict(attn.state_dict())
    types, n = attn.type_of_windows, len(attn.earth_position_index)
    x = torch.randn(6, types, n, 16)
    mask = torch.randn(3, types, n, n)
    with torch.no_grad():
        for each in (None, mask):
            assert torch.allclose(ours.eval()(x, each), attn(x, each), atol=1e-6)
