"""Tables: readable with one site and with a thousand, on wide and on narrow terminals."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from flashbias_convert.cli.tables import MAX_ROWS, notes, reasons, site_table, summary
from flashbias_convert.decompose.decision import HeadDecision
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.plan import Plan, SitePlan


def decision(head: int, rank: int, energy: float, error: float) -> HeadDecision:
    return HeadDecision(head, "low_rank", rank, energy, error, error / 4, error / 10, "cheapest")


SITE = SitePlan(
    "layers.0.attn",
    "toy",
    "patched",
    "low rank",
    n=256,
    m=256,
    heads=2,
    decisions=(decision(0, 4, 0.991, 0.5), decision(1, 9, 0.995, 0.25)),
    spec={"terms": [{"kind": "low_rank"}, {"kind": "regions"}]},
)


def plan_of(*sites: SitePlan) -> Plan:
    return Plan(DecomposeOptions(), list(sites))


def lines(plan: Plan, width: int) -> list[str]:
    console = Console(width=width, record=True, file=None, color_system=None)
    with console.capture() as capture:
        console.print(site_table(plan, width))
    return capture.get().splitlines()


def test_a_row_says_what_became_of_a_site() -> None:
    row = next(line for line in lines(plan_of(SITE), 120) if line.startswith("layers.0"))
    assert row.split() == [
        "layers.0.attn",
        "256",
        "2",
        "low_rank+regions",
        "6.5/9",
        "99.10",
        "0.5",
        "0.099",
        "0.050",
        "patched",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_narrow_terminals_lose_columns_and_not_text(width: int) -> None:
    site = dataclasses.replace(SITE, name="model.encoder.layers.10.blocks.3.attention.core")
    shown = lines(plan_of(site), width)
    assert max(map(len, shown)) <= max(width, 52)
    name = "".join(line.split(" ")[0] for line in shown if line.split(" ")[0] in site.name)
    assert name.replace("site", "") == site.name
    assert any("patched" in line for line in shown)


@pytest.mark.parametrize("width", [140, 160, 240])
def test_wide_terminals_show_the_reason(width: int) -> None:
    reason = "low rank is the cheapest form that holds the energy; 2 of 2 heads"
    name = "model.encoder.layers.10.blocks.3.attention.core"
    shown = lines(plan_of(dataclasses.replace(SITE, name=name, reason=reason)), width)
    assert max(map(len, shown)) <= width
    column = next(line for line in shown if "reason" in line).index("reason")
    assert reason in " ".join(line[column:].strip() for line in shown)
    assert not any("reason" in line for line in lines(plan_of(SITE), 139))


def test_alike_sites_with_several_reasons_say_so() -> None:
    sites = [dataclasses.replace(SITE, name=f"b.{i}.attn") for i in range(MAX_ROWS + 1)]
    sites[1] = dataclasses.replace(sites[1], reason="another")
    shown = " ".join(" ".join(lines(plan_of(*sites), 200)).split())
    assert "low rank (and 1 more)" in shown


def test_reasons_are_listed_per_site() -> None:
    assert reasons(plan_of(SITE)) == ["layers.0.attn: patched: low rank"]


def test_many_alike_sites_share_a_row() -> None:
    sites = [dataclasses.replace(SITE, name=f"blocks.{i}.attn") for i in range(1000)]
    sites[7] = dataclasses.replace(sites[7], status="left alone", reason="N = 256 is too short")
    shown = lines(plan_of(*sites), 120)
    assert len(shown) < 12
    assert any(line.startswith("blocks.*.attn (999)") for line in shown)
    assert any(line.startswith("blocks.7.attn") and "left alone" in line for line in shown)
    assert notes(plan_of(*sites)) == ["left alone: N = 256 is too short [blocks.7.attn]"]
    assert summary(plan_of(*sites)).startswith("999 of 1000 sites converted, 1 left alone")


def test_too_many_different_sites_are_cut_with_a_note() -> None:
    sites = [dataclasses.replace(SITE, name=f"attn{'x' * i}") for i in range(MAX_ROWS + 5)]
    shown = lines(plan_of(*sites), 160)
    assert any("5 more rows are left out; --report FILE has all" in line for line in shown)


def test_a_note_is_said_once_for_all_its_sites() -> None:
    sites = [dataclasses.replace(SITE, name=f"b.{i}", warnings=("watch out",)) for i in range(5)]
    assert notes(plan_of(*sites)) == ["warning: watch out [b.0, b.1, b.2 and 2 more]"]


def test_the_gain_of_a_group_is_its_smallest_and_narrow_terminals_leave_it_out() -> None:
    gains = [1.5 + at for at in range(MAX_ROWS)]
    sites = [
        dataclasses.replace(SITE, name=f"layers.{at}.attn", gain=g) for at, g in enumerate(gains)
    ]
    more = dataclasses.replace(SITE, name="layers.99.attn")  # nobody measured this one
    (row,) = (x for x in lines(plan_of(*sites, more), 100) if x.startswith("layers"))
    assert row.split()[-2:] == ["1.5x", "patched"]
    wide = "\n".join(lines(plan_of(sites[1]), 100))
    assert "2.5x" in wide and "gain: expected of the attention" in wide
    assert "gain" not in "\n".join(lines(plan_of(sites[1]), 99))
    assert "gain:" not in "\n".join(lines(plan_of(SITE), 100))
