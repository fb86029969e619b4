"""Figures hold the numbers that they claim to show; without matplotlib the error says so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashbias_convert import inspect_model
from flashbias_convert.errors import UsageError
from flashbias_convert.plan import Plan
from flashbias_convert.plotting import (
    draw_plan,
    energy_figure,
    errors_figure,
    folder,
    heads_figure,
    ranks_figure,
)
from flashbias_convert.plotting.plan_figures import short_names
from flashbias_convert.views import SiteView, site_views
from tests.toy import TOY, make_model

np = pytest.importorskip("numpy")
pytest.importorskip("matplotlib")

ROUGH: dict[str, Any] = {"recipes": [TOY], "method": "svd", "energy": 0.9, "fill": False}


def planned(depth: int = 2, **options: Any) -> tuple[Any, Plan, list[SiteView]]:
    model = make_model(depth)
    plan = inspect_model(model, **{**ROUGH, **options})
    return model, plan, list(site_views(model, plan, [TOY]))


def test_heat_maps_are_bias_terms_and_residual() -> None:
    _, _, views = planned()
    view = views[0]
    figure = heads_figure(view, [1, 0])
    maps = [ax.images[0] for ax in figure.axes if ax.images]
    assert len(maps) == 6
    residual = view.residual()
    for image, expected in zip(maps[:3], (view.bias, view.approximation, residual), strict=True):
        assert expected is not None
        assert np.array_equal(image.get_array(), expected[1].numpy())
    low, high = maps[0].get_clim()
    assert low == -high and maps[1].get_clim() == (low, high)
    assert maps[2].get_clim()[1] == pytest.approx(float(residual[1].abs().max()))  # type: ignore[index]
    labels = [ax.get_ylabel() for ax in figure.axes if ax.images]
    assert labels[0].startswith("head 1\nlow_rank, rank ") and labels[3].startswith("head 0\n")


def test_a_site_without_terms_shows_its_bias_alone() -> None:
    _, _, views = planned(exclude=["blocks.0.attn"])
    figure = heads_figure(views[0], [0])
    assert len([ax for ax in figure.axes if ax.images]) == 1
    assert "left alone" in figure.get_suptitle()


def test_the_energy_curves_pass_through_the_chosen_ranks() -> None:
    _, _, views = planned()
    view = views[0]
    ax = energy_figure(view, 0.9).axes[0]
    lines = {line.get_label(): line for line in ax.lines if line.get_label()[:5] == "head "}
    dots = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert list(lines) == ["head 0", "head 1"] and len(dots) == 2
    assert view.energy is not None
    for decision, dot in zip(view.site.decisions, dots, strict=True):
        shown = lines[f"head {decision.head}"].get_ydata()
        assert np.allclose(shown, np.maximum(1 - view.energy[decision.head].numpy(), 5e-5))
        assert dot.get_xdata()[0] == decision.rank
        assert 1 - dot.get_ydata()[0] == pytest.approx(decision.energy, abs=1e-6)
    (limit,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert limit.get_ydata()[0] == pytest.approx(0.1)


def test_ranks_are_bars_of_means_and_dots_of_heads() -> None:
    _, plan, _ = planned(3)
    ax = ranks_figure(plan).axes[0]
    assert [p.get_height() for p in ax.patches] == [np.mean(s.ranks()) for s in plan.sites]
    (dots,) = ax.collections
    expected = [(x, rank) for x, site in enumerate(plan.sites) for rank in site.ranks()]
    assert np.array_equal(dots.get_offsets(), expected)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "1", "2"]


def test_many_sites_share_their_names() -> None:
    _, plan, _ = planned(1)
    many = [replace(plan.sites[0], name=f"layers.{i}.attn") for i in range(2000)]
    ax = ranks_figure(Plan(plan.options, many)).axes[0]
    assert len(ax.get_xticklabels()) == 40 and len(ax.patches) == 2000


def test_a_plan_without_ranks_says_so() -> None:
    _, plan, _ = planned(method="exact")
    assert "no head has a low-rank term" in ranks_figure(plan).axes[0].texts[0].get_text()


def test_errors_are_counted_over_all_heads() -> None:
    _, plan, _ = planned(3)
    figure = errors_figure(plan)
    for ax in figure.axes:
        assert sum(p.get_height() for p in ax.patches) == 6  # 3 sites of 2 heads
    assert "6 heads" in figure.get_suptitle()
    errors_figure(Plan(plan.options, []))  # nothing to count


def test_what_cannot_be_drawn_is_an_error() -> None:
    _, plan, _ = planned(1)
    empty = SiteView(plan.sites[0], note="because")
    with pytest.raises(UsageError, match=r"nothing to draw of blocks\.0\.attn: because"):
        heads_figure(empty, [0])
    with pytest.raises(UsageError, match=r"no spectrum.*because"):
        energy_figure(empty, 0.9)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a.0.attn", "a.1.attn"], ["0", "1"]),
        (["attn"], ["attn"]),
        (["x.attn", "attn"], ["x.attn", "attn"]),
        (["a.0.x.attn", "a.1.attn"], ["0.x", "1"]),
        ([], []),
    ],
)
def test_short_names_differ(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short


def test_a_folder_holds_all_figures(tmp_path: Path) -> None:
    model, plan, _ = planned(2)
    seen: list[tuple[int, int, str]] = []
    files, notes = draw_plan(
        model, plan, tmp_path / "new", recipes=[TOY], progress=lambda *a: seen.append(a)
    )
    assert notes == [] and seen == [(1, 2, "blocks.0.attn"), (2, 2, "blocks.1.attn")]
    assert {f.name for f in files} == {
        "ranks.png",
        "errors.png",
        *(f"blocks.{i}.attn.{kind}.png" for i in (0, 1) for kind in ("energy", "heads_0-1")),
    }
    assert {p.name for p in (tmp_path / "new").iterdir()} == {f.name for f in files}
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_too_many_sites_are_cut_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MAX_SITES", 1)
    model, plan, _ = planned(3)
    files, notes = draw_plan(model, plan, tmp_path, recipes=[TOY])
    worst = max(plan.sites, key=lambda s: max(d.attention_error for d in s.decisions))
    assert {f.name for f in files if "energy" in f.name} == {f"{worst.name}.energy.png"}
    assert "3 sites: only the 1 that lose most" in notes[0]


def test_folders_that_are_in_use_are_refused(tmp_path: Path) -> None:
    model, plan, _ = planned(1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    (tmp_path / "file").touch()
    for name, message in (
        ("full", "is not empty"),
        ("file", "is not a folder"),
        ("no/where", "does not exist"),
    ):
        with pytest.raises(UsageError, match=message):
            draw_plan(model, plan, tmp_path / name, recipes=[TOY])


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = (
        "import sys\nsys.modules['matplotlib.figure'] = None\n"
        "from flashbias_convert.plotting import require_matplotlib\n"
        "try:\n    require_matplotlib()\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UsageError figures need matplotlib")
    assert "pip install 'flashbias-convert[plot]'" in done.stdout


def test_matplotlib_keeps_its_state(tmp_path: Path) -> None:
    code = (
        "import sys, flashbias_convert.plotting as p\n"
        "p.require_matplotlib()\nassert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
