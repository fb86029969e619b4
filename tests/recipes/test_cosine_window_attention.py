"""SwinV2's window attention of any repository: found by its parts, and tried out first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.recipe import Registry
from scripts.whole_models.copies import CosineWindowAttention
from tests.recipes.parity import CHECKS, ONCE, Case, randomise


class Halved(CosineWindowAttention):
    factor = 8.0


Halved.__name__ = "WindowAttention"


class Blocks(nn.Module):
    """Two windows in turn, the second with a mask that keeps two regions apart."""

    def __init__(
        self, window: tuple[int, int], trained: tuple[int, int] = (0, 0), bias: bool = True
    ) -> None:
        super().__init__()
        n = math.prod(window)
        self.attn = nn.ModuleList(
            CosineWindowAttention(16, window, 2, trained, bias) for _ in range(2)
        )
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
    assert found.knows(CosineWindowAttention) and not found.knows(nn.Linear)


@pytest.mark.parametrize("name", ["window_size", "pretrained_window_size"])
def test_a_window_that_is_no_pair_is_nobodys(name: str) -> None:
    """As in copies that take one number for both sides."""
    module = CosineWindowAttention(16, (4, 4), 2, (0, 0), bias=True)
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
