"""Window attention of any repository: found by its parts, and tried out before it is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, patch_model, unpatch_model
from flashbias_convert.recipe import Registry
from flashbias_convert.relative_positions import window_index
from tests.recipes.parity import CHECKS, ONCE, Case, check_handed_index, original, randomise
from tests.support import assert_parity


class WindowAttention(nn.Module):
    """As in Microsoft's repository and SwinIR: (x, mask)."""

    factor = 1.0

    def __init__(self, dim: int, window_size: tuple[int, ...], num_heads: int) -> None:
        super().__init__()
        self.window_size, self.num_heads = window_size, num_heads
        self.scale = (dim // num_heads) ** -0.5
        index = window_index(window_size)
        entries = int(index.max()) + 1
        self.relative_position_bias_table = nn.Parameter(torch.zeros(entries, num_heads))
        self.register_buffer("relative_position_index", index)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, self.relative_position_index, mask)  # type: ignore[arg-type]

    def attend(self, x: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
        windows, n, dim = x.shape
        qkv = self.qkv(x).reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = self.scale * qkv[0] @ qkv[1].transpose(-2, -1)
        scores = scores + self.factor * self.relative_position_bias_table[index].permute(2, 0, 1)
        if mask is not None:
            scores = scores.unflatten(0, (-1, len(mask))) + mask[:, None]
            scores = scores.flatten(0, 1)
        out = self.attn_drop(scores.softmax(-1)) @ qkv[2]
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(windows, n, dim)))


class Handed(WindowAttention):
    """As in HAT: the network keeps the index."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.relative_position_index

    def forward(self, x: Tensor, rpi: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.attend(x, rpi, mask)


Handed.__name__ = "WindowAttention"  # a class of its own, which happens to be derived


class Doubled(WindowAttention):
    factor = 2.0


class Blocks(nn.Module):
    """Two windows in turn, the second with a mask that keeps two regions apart."""

    def __init__(self, kind: type[WindowAttention], window: tuple[int, ...]) -> None:
        super().__init__()
        self.kind, n = kind, len(window_index(window))
        self.attn = nn.ModuleList([kind(16, window, 2), kind(16, window, 2)])
        region = torch.arange(2 * n).view(2, n) % 3 == 0
        mask = (region[:, :, None] != region[:, None, :]).float() * -100.0
        self.register_buffer("mask", mask)
        self.register_buffer("index", window_index(window))

    def forward(self, x: Tensor) -> Tensor:
        handed = (self.index,) if self.kind is Handed else ()
        x = x + self.attn[0](x, *handed)
        out: Tensor = x + self.attn[1](x, *handed, mask=self.mask)
        return out


def case(name: str, kind: type[WindowAttention], window: tuple[int, ...]) -> Case:
    size = (4, len(window_index(window)), 16)
    return Case(name, lambda: Blocks(kind, window), size, sites=2, masked=True)


SWIN = case("index of its own", WindowAttention, (4, 5))
HAT = case("index that is handed over", Handed, (4, 4))
CASES = [SWIN, HAT, case("three axes", WindowAttention, (2, 3, 3))]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", ONCE)
def test_changes(check: Callable[[Case], None]) -> None:
    check(SWIN)


def test_the_bias_is_a_table() -> None:
    for each in CASES:
        plan = inspect_model(each.model(), method="exact")
        assert {site.terms()[0] for site in plan.sites} == {"relative_table"}


def test_another_index_in_a_call_is_used_as_it_is() -> None:
    model, x = HAT.model(), HAT.inputs()
    HAT.patch(model)
    assert_parity(HAT.output(model, x), HAT.output(original(model), x), HAT.truth(model, x))
    model.index.copy_(model.index.flip(0))
    assert torch.equal(HAT.output(model, x), HAT.output(original(model), x))


@torch.no_grad()
def test_an_index_that_is_made_anew_for_each_call_is_looked_at_each_time() -> None:
    """A new tensor may lie where another one was."""
    model, x = HAT.model(), HAT.inputs()
    HAT.patch(model)
    attn, right, turned = model.attn[0], model.index.clone(), model.index.flip(0)
    for source in (right, turned) * 10:
        index = source + 0
        wanted = attn.original_forward(x, index)
        torch.testing.assert_close(attn(x, index), wanted, rtol=0, atol=1e-5)
        del index


def test_calls_leave_nothing_on_the_module() -> None:
    """Another window, converted anew, must not be judged by what was found for this one."""
    model, x = HAT.model(), HAT.inputs()
    before = [set(vars(module)) for module in model.modules()]
    HAT.patch(model)
    HAT.output(model, x)
    model.index.copy_(model.index.flip(0))
    HAT.output(model, x)
    unpatch_model(model)
    assert [set(vars(module)) for module in model.modules()] == before


def test_another_index_of_its_own_is_refused() -> None:
    model = SWIN.model()
    model.attn[0].relative_position_index.copy_(model.attn[0].relative_position_index.T.clone())
    reasons = {site.name: (site.status, site.reason) for site in inspect_model(model).sites}
    assert reasons["attn.0"][0] == "unsupported" and "index" in reasons["attn.0"][1]


def test_what_computes_something_else_is_not_trusted() -> None:
    """It has all the parts, and adds its table twice."""

    model = Doubled(16, (4, 4), 2)
    randomise(model)
    (site,) = inspect_model(model).sites
    assert site.status == "unsupported" and "something else" in site.reason
    x = torch.randn(2, 16, 16)
    with torch.no_grad():
        before = model(x)
        patch_model(model, force_all=True)
        assert torch.equal(model(x), before)


def test_a_forward_of_another_kind_is_unsupported() -> None:
    class Strange(WindowAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    Strange.__name__ = "WindowAttention"
    (site,) = inspect_model(Strange(16, (4, 4), 2)).sites
    assert site.status == "unsupported" and "tried out" in site.reason


@pytest.mark.parametrize("change", [lambda out: out[:, :3], lambda out: out.float()])
def test_a_result_of_another_kind_is_not_trusted(change: Callable[[Tensor], Tensor]) -> None:
    class Strange(WindowAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return change(super().forward(x, mask))

    Strange.__name__ = "WindowAttention"
    (site,) = inspect_model(Strange(16, (4, 4), 2)).sites
    assert site.status == "unsupported" and "something else" in site.reason


@pytest.mark.parametrize("lacking", ["relative_position_bias_table", "qkv", "scale"])
def test_other_classes_of_the_name_are_nobodys(lacking: str) -> None:
    module = WindowAttention(16, (4, 4), 2)
    assert Registry().find(module) is not None
    delattr(module, lacking)
    assert Registry().find(module) is None


@pytest.mark.parametrize("window", [(4, 5), 5, None])
def test_a_table_of_another_size_is_nobodys(window: Any) -> None:
    module = WindowAttention(16, (4, 4), 2)
    module.window_size = window
    assert Registry().find(module) is None


def test_windows_of_another_size_run_the_original() -> None:
    """The original refuses them where its index cannot be cut."""
    model = SWIN.model()
    SWIN.patch(model)
    with pytest.raises(RuntimeError), torch.no_grad():
        model.attn[0](torch.randn(1, 7, 16))


@pytest.mark.filterwarnings("ignore")
def test_a_network_with_one_index_is_compiled_whole() -> None:
    check_handed_index(HAT, "index")
