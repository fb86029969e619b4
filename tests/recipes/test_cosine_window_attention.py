"""SwinV2's window attention of any repository: found by its parts, and tried out first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.recipe import Registry
from flashbias_convert.relative_positions import window_index
from tests.recipes.parity import CHECKS, ONCE, Case, randomise


class WindowAttention(nn.Module):
    """The interface of Microsoft's class."""

    factor = 16.0

    def __init__(
        self, dim: int, window: tuple[int, int], heads: int, trained: tuple[int, int], bias: bool
    ) -> None:
        super().__init__()
        self.window_size, self.pretrained_window_size, self.num_heads = window, trained, heads
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(inplace=True), nn.Linear(32, heads, bias=False)
        )
        spans = trained if trained[0] > 0 else window
        rows, columns = (
            8.0 * torch.arange(1 - size, size) / (span - 1)
            for size, span in zip(window, spans, strict=True)
        )
        table = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)[None]
        table = table.sign() * torch.log2(table.abs() + 1.0) / math.log2(8)
        self.register_buffer("relative_coords_table", table)
        self.register_buffer("relative_position_index", window_index(window))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.v_bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.proj, self.softmax = nn.Linear(dim, dim), nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, n, dim = x.shape
        bias = None
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * self.logit_scale.clamp(max=math.log(100.0)).exp()
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        added = table[self.relative_position_index.view(-1)].view(n, n, -1).permute(2, 0, 1)  # type: ignore[operator]
        scores = scores + self.factor * added.sigmoid()
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        out = self.attn_drop(self.softmax(scores)) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(windows, n, dim)))


class Halved(WindowAttention):
    factor = 8.0


Halved.__name__ = "WindowAttention"


class Blocks(nn.Module):
    """Two windows in turn, the second with a mask that keeps two regions apart."""

    def __init__(
        self, window: tuple[int, int], trained: tuple[int, int] = (0, 0), bias: bool = True
    ) -> None:
        super().__init__()
        n = math.prod(window)
        self.attn = nn.ModuleList(WindowAttention(16, window, 2, trained, bias) for _ in range(2))
        region = torch.arange(2 * n).view(2, n) % 3 == 0
        mask = (region[:, :, None] != region[:, None, :]).float() * -100.0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn[0](x)
        out: Tensor = x + self.attn[1](x, mask=self.mask)
        return out


def case(name: str, window: tuple[int, int], **options: Any) -> Case:
    size = (12, math.prod(window), 16)
    return Case(name, lambda: Blocks(window, **options), size, sites=2, masked=True)


PLAIN = case("plain", (4, 4))
CASES = [
    PLAIN,
    case("other window than trained", (4, 6), trained=(8, 8)),
    case("no biases", (4, 4), bias=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", ONCE)
def test_changes(check: Callable[[Case], None]) -> None:
    check(PLAIN)


def test_it_has_a_recipe_of_its_own() -> None:
    """Beside the one for tables, which goes by the same name of a class."""
    found = Registry().find(PLAIN.model().attn[0])
    assert found is not None and found.name == "cosine_window_attention"
    assert found.knows(WindowAttention) and not found.knows(nn.Linear)


@pytest.mark.parametrize("name", ["window_size", "pretrained_window_size"])
def test_a_window_that_is_no_pair_is_nobodys(name: str) -> None:
    """As in copies that take one number for both sides."""
    module = WindowAttention(16, (4, 4), 2, (0, 0), bias=True)
    assert Registry().find(module) is not None
    for size in (4, None, (4, 4, 4)):
        setattr(module, name, size)
        assert Registry().find(module) is None


def test_what_computes_something_else_is_not_trusted() -> None:
    model = Halved(16, (4, 4), 2, (0, 0), bias=True)
    randomise(model)
    (site,) = inspect_model(model).sites
    assert site.status == "unsupported" and "something else" in site.reason
    x = torch.randn(2, 16, 16)
    with torch.no_grad():
        before = model(x)
        patch_model(model, force_all=True)
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("buffer", ["relative_coords_table", "relative_position_index"])
def test_buffers_of_another_window_are_refused(buffer: str) -> None:
    model = PLAIN.model()
    changed = model.attn[0].get_buffer(buffer)
    changed.copy_(changed.flip(0 if changed.dim() == 2 else 1))
    status = {site.name: site.status for site in inspect_model(model, force_all=True).sites}
    assert status == {"attn.0": "unsupported", "attn.1": "patched"}
