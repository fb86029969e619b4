"""HAT's overlapping cross-attention: a class of the same interface, tried out before trusted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import fallback, inspect_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.recipe import Registry
from tests.recipes.parity import CHECKS, ONCE, Case, check_handed_index, original, randomise
from tests.support import assert_parity

SIDE, DIM, HEADS = 4, 12, 2
MAP = (8, 12)


def offsets(side: int, larger: int) -> Tensor:
    """HAT's index, from its definition: key minus query, moved by side - larger + 1."""
    own = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    keys = torch.cartesian_prod(torch.arange(larger), torch.arange(larger))
    apart = keys[None] - own[:, None] + side - larger + 1
    return apart[..., 0] * (side + larger - 1) + apart[..., 1]


class OCAB(nn.Module):
    factor = 1.0

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        self.dim, self.window_size, self.num_heads = DIM, SIDE, HEADS
        self.scale = (DIM // HEADS) ** -0.5
        self.overlap_win_size = int(SIDE * ratio) + SIDE
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        padding = (self.overlap_win_size - SIDE) // 2
        self.unfold = nn.Unfold(self.overlap_win_size, stride=SIDE, padding=padding)
        entries = (SIDE + self.overlap_win_size - 1) ** 2
        self.relative_position_bias_table = nn.Parameter(torch.zeros(entries, HEADS))
        self.softmax = nn.Softmax(dim=-1)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, x_size: tuple[int, int], rpi: Tensor) -> Tensor:
        shortcut, (h, w) = x, x_size
        b, m = len(x), self.overlap_win_size**2
        q, k, v = self.qkv(self.norm1(x).view(b, h, w, DIM)).split(DIM, -1)
        q = q.view(b, h // SIDE, SIDE, w // SIDE, SIDE, DIM).transpose(2, 3)
        q = q.reshape(-1, SIDE * SIDE, HEADS, DIM // HEADS).transpose(1, 2)
        windows = self.unfold(torch.cat([k, v], -1).permute(0, 3, 1, 2))  # (b, 2 DIM m, nW)
        windows = windows.view(b, 2, HEADS, DIM // HEADS, m, -1).permute(1, 0, 5, 2, 4, 3)
        k, v = windows.reshape(2, -1, HEADS, m, DIM // HEADS)
        bias = self.relative_position_bias_table[rpi.view(-1)].view(SIDE**2, m, -1)
        scores = self.scale * q @ k.transpose(-2, -1) + self.factor * bias.permute(2, 0, 1)
        out = (self.softmax(scores) @ v).transpose(1, 2)
        out = out.reshape(b, h // SIDE, w // SIDE, SIDE, SIDE, DIM).transpose(2, 3)
        x = self.proj(out.reshape(b, h * w, DIM)) + shortcut
        return x + self.mlp(self.norm2(x))


class Doubled(OCAB):
    factor = 2.0


class Network(nn.Module):
    """Two blocks and the index, which the network keeps."""

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OCAB(ratio), OCAB(ratio)])
        self.register_buffer("rpi", offsets(SIDE, self.blocks[0].overlap_win_size))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, MAP, self.rpi)
        return x


HALF = Case("half as large again", Network, (2, MAP[0] * MAP[1], DIM), sites=2)
TWICE = Case("twice as large", lambda: Network(1.0), (2, MAP[0] * MAP[1], DIM), sites=2)


@pytest.mark.parametrize("case", [HALF, TWICE], ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", ONCE)
def test_changes(check: Callable[[Case], None]) -> None:
    check(HALF)


def test_the_bias_is_a_table() -> None:
    plan = inspect_model(HALF.model(), method="exact")
    assert {(site.n, site.m) for site in plan.sites} == {(16, 36)}
    assert {site.terms() for site in plan.sites} == {("relative_table",)}


def test_another_index_in_a_call_is_used_as_it_is() -> None:
    model, x = HALF.model(), HALF.inputs()
    HALF.patch(model)
    assert_parity(HALF.output(model, x), HALF.output(original(model), x), HALF.truth(model, x))
    model.rpi.copy_(model.rpi.flip(0))
    fallback._warn.cache_clear()
    with pytest.warns(BackendFallbackWarning, match="another index"):
        out = HALF.output(model, x)
    assert torch.equal(out, HALF.output(original(model), x))


def test_what_computes_something_else_is_not_trusted() -> None:
    module = Doubled()
    randomise(module)
    (site,) = inspect_model(module).sites
    assert site.status == "unsupported" and "something else" in site.reason


def test_a_forward_of_another_kind_is_unsupported() -> None:
    class Strange(OCAB):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    Strange.__name__ = "OCAB"
    (site,) = inspect_model(Strange()).sites
    assert site.status == "unsupported" and "tried out" in site.reason


@pytest.mark.parametrize("lacking", ["relative_position_bias_table", "qkv", "unfold", "mlp"])
def test_other_classes_of_the_name_are_nobodys(lacking: str) -> None:
    module = OCAB()
    assert Registry().find(module) is not None
    delattr(module, lacking)
    assert Registry().find(module) is None


def test_a_table_of_another_size_is_nobodys() -> None:
    module = OCAB()
    module.overlap_win_size = 7
    assert Registry().find(module) is None


@pytest.mark.filterwarnings("ignore")
def test_a_network_with_one_index_is_compiled_whole() -> None:
    check_handed_index(HALF, "rpi")
