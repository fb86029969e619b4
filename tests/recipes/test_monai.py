"""Window attention of MONAI's SwinUNETR: its own class if it is there, else one like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.relative_positions import window_index
from tests.recipes.parity import CHECKS, ONCE, Case

DIM, HEADS = 16, 2


class Published(nn.Module):
    """As in MONAI 1.6: (x, mask), with the first rows and columns of the index."""

    def __init__(self, dim: int, num_heads: int, window_size: tuple[int, ...]) -> None:
        super().__init__()
        self.window_size, self.num_heads = window_size, num_heads
        self.scale = (dim // num_heads) ** -0.5
        index = window_index(window_size)
        table = torch.zeros(int(index.max()) + 1, num_heads)
        self.relative_position_bias_table = nn.Parameter(table)
        self.register_buffer("relative_position_index", index)
        self.qkv, self.proj = nn.Linear(dim, dim * 3, bias=False), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        index: Any = self.relative_position_index
        scores = self.scale * q @ k.mT
        scores = scores + self.relative_position_bias_table[index[:n, :n]].permute(2, 0, 1)
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        out = self.attn_drop(self.softmax(scores)) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(b, n, c)))


try:
    from monai.networks.nets.swin_unetr import WindowAttention
except ImportError:
    WindowAttention = Published  # type: ignore[misc]
    Published.__module__ = "monai.networks.nets.swin_unetr"
    Published.__name__ = Published.__qualname__ = "WindowAttention"


class Stage(nn.Module):
    """Two windows in turn, the second with a mask that keeps regions apart."""

    def __init__(self, window: tuple[int, ...]) -> None:
        super().__init__()
        self.attn = nn.ModuleList([WindowAttention(DIM, HEADS, window) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        region = torch.arange(2 * n, device=x.device).view(2, n) % 3 == 0
        mask = (region[:, :, None] != region[:, None, :]).to(x.dtype) * -100.0
        x = x + self.attn[0](x, None)
        out: Tensor = x + self.attn[1](x, mask)
        return out


def case(name: str, window: tuple[int, ...], n: int) -> Case:
    return Case(name, lambda: Stage(window), (12, n, DIM), sites=2, masked=True)


FULL = case("full windows", (2, 3, 4), 24)
SMALLER = case("smaller windows", (3, 3, 4), 18)
CASES = [FULL, SMALLER, case("two axes", (3, 4), 12)]
#: nothing is truncated in a smaller window
CHANGES = [
    (c, check)
    for c in (FULL, SMALLER)
    for check in ONCE
    if c is FULL or "trunc" not in check.__name__
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize(("case", "check"), CHANGES)
def test_changes(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_the_recipe_is_that_of_monai() -> None:
    plan = inspect_model(FULL.model(), method="exact")
    assert {site.recipe for site in plan.sites} == {"monai_swin_unetr"}
    assert {site.terms()[0] for site in plan.sites} == {"relative_table"}


def test_smaller_windows_do_not_run_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SMALLER.model()
    SMALLER.patch(model)
    monkeypatch.setattr(type(model.attn[0]), "original_forward", None)
    calls: list[int] = []
    forward = ScoreBiasModule.forward

    def counted(self: Any, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(q.shape[-2])
        return forward(self, q, *args, **kwargs)

    monkeypatch.setattr(ScoreBiasModule, "forward", counted)
    SMALLER.output(model, SMALLER.inputs())
    assert calls == [18, 18]
