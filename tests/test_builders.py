"""Terms that are made from the input of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import apply_plan, inspect_model, patch_model
from flashbias_convert.attention import flashbias_attention
from flashbias_convert.builders import find_builder
from flashbias_convert.built_terms import axial_rows, cls_window_table, distance_table, window_table
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.plan import Plan
from flashbias_convert.recipe import Description, Recipe, Site
from flashbias_convert.terms import ScoreBias
from tests.support import assert_parity


class DecomposedAttention(nn.Module):
    """Attention over a map whose bias is q times tables of relative rows and columns."""

    def __init__(self, height: int = 3, width: int = 5, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.height, self.width, self.heads = height, width, heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.randn(2 * height - 1, dim // heads))
        self.rel_pos_w = nn.Parameter(torch.randn(2 * width - 1, dim // heads))

    def tables(self) -> dict[str, Tensor]:
        y, x = torch.arange(self.height), torch.arange(self.width)
        rows = y[:, None] - y + self.height - 1
        columns = x[:, None] - x + self.width - 1
        return {"rel_h": self.rel_pos_h[rows], "rel_w": self.rel_pos_w[columns]}

    def heads_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return q, k, v

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.heads_of(tokens)
        tables = self.tables()
        grid = q.unflatten(2, (self.height, self.width))
        rel_h = torch.einsum("bhyxd,ykd->bhyxk", grid, tables["rel_h"])
        rel_w = torch.einsum("bhyxd,xkd->bhyxk", grid, tables["rel_w"])
        bias = (rel_h[..., :, None] + rel_w[..., None, :]).flatten(-2).flatten(2, 3)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(-1)
        out: Tensor = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return out


class FusedDecomposed(PatchedAttention):
    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.rel_pos_h, self.rel_pos_w)

    def flashbias_forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.heads_of(tokens)
        out = self.score_bias(q, k, v, built={"axial_rows": {"q": q, **self.tables()}})
        return self.proj(out.transpose(1, 2).flatten(2))


def describe(site: Site) -> Description:
    return Description(None, 2, 15, 15, 8, builders=("axial_rows",))


RECIPE = Recipe(
    name="decomposed",
    title="a toy with decomposed relative positions",
    classes=(f"{__name__}.DecomposedAttention",),
    library="torch",
    tested=">=2",
    attention=FusedDecomposed,
    describe=describe,
)


def make(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(DecomposedAttention(), DecomposedAttention()).eval()


def tokens() -> Tensor:
    return torch.randn(2, 15, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_model_with_builders(dtype: torch.dtype, backend: str) -> None:
    with torch.no_grad():
        truth = make().double()(tokens().double())
        model, x = make().to(dtype), tokens().to(dtype)
        plain = model(x)
        plan = patch_model(model, recipes=[RECIPE], backend=backend)
        assert plan.sites[0].reason == "axial_rows in each call"
        assert plan.sites[0].builders() == ("axial_rows",) and plan.sites[0].terms() == ()
        assert_parity(model(x), plain, truth)


def test_a_plan_from_a_file_names_its_builders() -> None:
    source = make()
    plan = patch_model(source, recipes=[RECIPE], backend="eager")
    model = make(seed=3)
    loaded = Plan.from_json(plan.to_json())
    apply_plan(model, loaded, recipes=[RECIPE], backend="eager", empty=True)
    model.load_state_dict(source.state_dict())
    with torch.no_grad():
        assert torch.equal(model(tokens()), source(tokens()))


def test_a_builder_that_is_not_planned_is_not_used() -> None:
    q = torch.randn(1, 2, 15, 8)
    terms = ScoreBiasModule(ScoreBias((), 2), "eager")
    with pytest.raises(KeyError, match="axial_rows"):
        terms(q, q, q, built={"axial_rows": {"q": q}})


def test_an_unknown_builder_is_an_error() -> None:
    plan = inspect_model(make(), recipes=[RECIPE])
    site = plan.sites[0]
    assert site.spec is not None
    newer = dataclasses.replace(site, spec={**site.spec, "builders": ["of tomorrow"]})
    with pytest.raises(ValueError, match="unknown builder 'of tomorrow'"):
        apply_plan(make(), dataclasses.replace(plan, sites=[newer]), recipes=[RECIPE])


def test_rows_are_products_with_tables() -> None:
    torch.manual_seed(0)
    module = DecomposedAttention()
    q = torch.randn(2, 2, 15, 8, dtype=torch.float64)
    term = axial_rows(q=q, **module.tables())
    expected = torch.zeros(2, 2, 15, 15, dtype=torch.float64)
    for i in range(15):
        for j in range(15):
            row = module.rel_pos_h[i // 5 - j // 5 + 2].double()
            column = module.rel_pos_w[i % 5 - j % 5 + 4].double()
            expected[..., i, j] = q[..., i, :] @ (row + column)
    torch.testing.assert_close(term.dense(15, 15, dtype=torch.float64), expected)
    out = flashbias_attention(q, q, q, ScoreBias((term,), 2), backend="eager")
    weights = (q @ q.transpose(-1, -2) * 8**-0.5 + expected).softmax(-1)
    torch.testing.assert_close(out, weights @ q)


def test_special_tokens_take_no_part() -> None:
    torch.manual_seed(0)
    module = DecomposedAttention()
    q = torch.randn(2, 2, 17, 8)
    plain = axial_rows(q=q[..., 2:, :], **module.tables()).dense(15, 15)
    found = axial_rows(q=q, special=2, **module.tables()).dense(17, 17)
    torch.testing.assert_close(found[..., 2:, 2:], plain)
    assert not found[..., :2, :].any() and not found[..., :2].any()


def test_a_table_of_distances() -> None:
    torch.manual_seed(0)
    n, m, table, gate = 3, 5, torch.randn(2, 7), torch.randn(4, 2, 3)
    term = distance_table(table=table.bfloat16(), n=n, gate=gate)
    found = term.dense(n, m)
    for i in range(n):
        for j in range(m):
            value = table.bfloat16().float()[:, j - i + n - 1]
            torch.testing.assert_close(found[..., i, j], gate[..., i] * value)


def test_builders_say_what_they_replace() -> None:
    assert find_builder("padded_alibi").replaces == ("alibi",)
    assert find_builder("axial_rows").replaces == ()


@pytest.mark.parametrize("window", [(3, 4), (4, 3), (1, 6), (7, 7), (8, 8), (2, 1)])
def test_windows_of_an_even_width_come_in_pairs(window: tuple[int, int]) -> None:
    height, width = window
    table = torch.randn((2 * height - 1) * (2 * width - 1), 3)
    term = window_table(table=table, window=window)
    term.check_codes()
    assert term.pairs == (width % 2 == 0)
    special = cls_window_table(table=torch.randn(len(table) + 3, 3), window=window)
    special.check_codes()
    assert not special.pairs


@pytest.mark.parametrize("heads", [1, 3])
def test_a_table_of_windows_that_is_kept_holds_nothing_of_its_source(heads: int) -> None:
    table = torch.randn(9, heads)
    term = window_table(table=table, window=(2, 2))
    assert window_table(table=table, window=(2, 2)) is term
    assert term.table.data_ptr() != table.data_ptr() and term.table.is_contiguous()
    assert torch.equal(term.table, table.T)
