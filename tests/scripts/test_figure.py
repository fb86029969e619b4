"""Pictures of whole models: what stands in them, and in what order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

pytest.importorskip("matplotlib")

from whole_models import figure
from whole_models.case import WAYS

from flashbias_convert import plotting


def row(variant: str, ms: str = "", reason: str = "", **more: str) -> dict[str, str]:
    known = {"model": "plain 1024", "tokens": "1024", "device": "card", "dtype": "bfloat16",
             "peak_mib": "1", "bias_mib": "1"}  # fmt: skip
    mode = figure.split_variant(variant)[1]
    status = "measured" if ms else "failed"
    found = {**known, "variant": variant, "mode": mode, "median_ms": ms, "reason": reason}
    return {**found, "status": status, **more}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are made."""
    figures: list[Any] = []
    make = plotting.figure.new_figure

    def new_figure(width: float, height: float) -> Any:
        figures.append(make(width, height))
        return figures[-1]

    monkeypatch.setattr(plotting.figure, "new_figure", new_figure)
    return figures


@pytest.mark.parametrize(
    ("value", "said"),
    [(3079.97, "3,080"), (296.46, "296"), (99.96, "100"), (12.05, "12.1"), (9.0, "9.00"),
     (0.03418, "0.0342"), (0.0, "0.00")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, said: str) -> None:
    assert figure.number(value) == said


def test_every_way_has_words_and_a_colour() -> None:
    assert figure._COLORS.keys() == WAYS.keys()
    assert figure.words("sdpa-cudnn") == "dense bias, SDPA with cuDNN, eager"
    assert figure.words("exact-graphs") == "ours, exact, CUDA graphs"


def test_bars_are_sorted_and_long_ones_are_cut(tmp_path: Path, made: list[Any]) -> None:
    reason = "InductorError: " + "many words of a compiler that nobody reads " * 3
    rows = [row("original", "3000"), row("flex-compiled", "", reason), row("exact", "90"),
            row("exact-compiled", "80", paper_row="FlashBias", paper_time="39.26",
                paper_delta="0.49")]  # fmt: skip
    figure.draw(rows, tmp_path / "x.png", "Plain", "s per 100 calls", 0.1)
    (ax,) = made[0].axes
    names = [tick.get_text() for tick in ax.get_yticklabels()]
    assert names == ["ours, exact, compiled", "ours, exact, eager", "original, eager",
                     "dense bias, FlexAttention, compiled"]  # fmt: skip
    assert "s per 100 calls" in ax.get_xlabel() and "cut" in ax.get_xlabel()
    longest = [bar.get_width() for bar in ax.patches][2]
    assert longest < 2 * 9.0  # and not 300
    said = [text.get_text().strip() for text in ax.texts]
    assert {"8.00", "9.00", "300", "FlashBias: 39.26 (+0.49)"} <= set(said)
    failed = next(text for text in said if text.startswith("InductorError"))
    assert failed.endswith("...") and failed.removesuffix(" ...").split()[-1] in reason.split()
    assert [bar.get_hatch() for bar in ax.patches][:2] == ["", "////"]  # compiled and eager
    assert (tmp_path / "x.png").stat().st_size > 0


def test_bars_that_are_a_little_longer_are_whole(tmp_path: Path, made: list[Any]) -> None:
    rows = [row("exact-graphs", "3.3"), row("original", "26"), row("exact", "34")]
    figure.draw(rows, tmp_path / "x.png", "Decoding", "ms", 1.0)
    (ax,) = made[0].axes
    assert max(bar.get_width() for bar in ax.patches) == 34.0
    assert "cut" not in ax.get_xlabel()


def test_lengths_have_marks_for_failures_and_a_legend_of_what_is_drawn(
    tmp_path: Path, made: list[Any]
) -> None:
    longer = {"model": "plain 65536", "tokens": "65536"}
    rows = [row("exact-compiled", "1"), row("exact-compiled", "4", **longer),
            row("original", "9"), row("original", "", "out of memory", **longer),
            row("flex-compiled", "", "InductorError", **longer)]  # fmt: skip
    figure.draw_lengths(rows, tmp_path / "x.png", "Plain")
    first, *_, last = made[0].axes
    lost = [line for line in first.lines if line.get_xdata()[0] == 65536]
    assert sorted(line.get_marker() for line in lost) == ["+", "x"]
    highest = first.transAxes.inverted().transform(first.transData.transform((1024, 9)))[1]
    assert highest < min(line.get_ydata()[0] for line in lost)  # they hide nothing measured
    assert "x: out of memory; +: failed" in made[0].get_suptitle()
    names = [text.get_text() for text in last.get_legend().get_texts()]
    assert names == ["original, eager", "ours, exact, compiled",
                     "dense bias, FlexAttention, compiled"]  # fmt: skip
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["1,024", "65,536"]


def test_many_models_are_one_chart(tmp_path: Path, made: list[Any]) -> None:
    rows = []
    for i in range(30):
        model = {"model": f"model {i}", "replay_ms": "1"}
        rows += [row("original-compiled", f"{i + 1}", **model), row("original", "90", **model)]
        rows.append(row("forced-compiled" if i == 7 else "ours-compiled", "2", **model))
    rows[2]["replay_ms"] = ""
    figure.draw(rows, tmp_path / "x.png")
    (ax,) = made[0].axes
    names = [tick.get_text() for tick in ax.get_yticklabels()]
    assert names[0] == "model 0" and names[-1] == "model 29"
    assert names[7] == "model 7 (a plan leaves it alone)"
    assert figure.ratios(rows)["model 0"] == (0.5, None)
    assert figure.ratios(rows)["model 9"] == (5.0, 1.0)
