"""Bars of attention: what is not correct is seen, and is not taken for fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

pytest.importorskip("matplotlib")

import attention_figure
import bench_attention
import bench_lengths
import row_file
from attention_shapes import SHAPES
from matplotlib.colors import to_rgba
from optional_peers import MODULES, NOT_INSTALLED

RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "results"
FIRST = "a shape"


def row(peer: str, ms: str = "", state: str = "ok", shape: str = FIRST) -> dict[str, str]:
    return {"shape": shape, "peer": peer, "median_ms": ms, "state": state, "card": "none"}


def drawn(*rows: dict[str, str]) -> tuple[Any, list[str], dict[tuple[float, ...], Any]]:
    """The axes, all texts in them, and bars by their colours."""
    figure = attention_figure.figure_of(list(rows))
    (axes,) = figure.axes
    figure.draw_without_rendering()
    bars = {bar.get_edgecolor() if bar.get_hatch() else bar.get_facecolor(): bar
            for bar in axes.patches}  # fmt: skip
    return axes, [text.get_text() for text in axes.texts], bars


def colour(peer: str) -> tuple[float, ...]:
    return to_rgba(attention_figure.COLOURS[peer])


def named(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.figure.legends[0].get_texts()]


def test_a_wrong_result_is_hatched_and_says_so() -> None:
    axes, said, bars = drawn(
        row("ours", "2"), row("cudnn, dense", "0.5", "wrong"), row("efficient, dense", "6")
    )
    wrong, right = bars[colour("cudnn, dense")], bars[colour("efficient, dense")]
    assert wrong.get_hatch() and not right.get_hatch()
    assert wrong.get_x() + wrong.get_width() == 0.25  # its time over ours
    assert sorted(said) == ["0.500 ms, wrong", "3.00"]  # and no ratio in numbers
    assert axes.get_xlim()[0] < 0.25
    assert named(axes) == ["efficient, dense", "cudnn, dense", "wrong"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("out of memory", "out of memory"),
        ("crashed", "crashed"),
        ("wrong", "wrong"),
        ("RuntimeError: No available kernel. Aborting execution.",
         "failed: No available kernel. Aborting execution."),
        ("InductorError: " + "many words " * 9, "failed: " + "many words " * 4 + "..."),
        ("AssertionError: ", "failed"),
    ],
)  # fmt: skip
def test_a_failure_is_words_in_the_place_of_a_bar(state: str, words: str) -> None:
    axes, said, bars = drawn(row("ours", "2"), row("flex, dense", "", state),
                             row("cudnn, dense", "4"))  # fmt: skip
    assert sorted(said) == sorted(["2.00", words])
    assert bars.keys() == {colour("cudnn, dense")}
    assert "flex, dense" in named(axes)
    ys = [text.get_position()[1] for text in axes.texts]
    assert len(set(ys)) == 2


def test_what_is_not_installed_takes_no_place() -> None:
    rows = [row("ours", "2"), row("cudnn, dense", "4"), row("flex, dense", "5")]
    axes, said, bars = drawn(*rows)
    more, said_more, bars_more = drawn(*rows, *(row(peer, "", NOT_INSTALLED) for peer in MODULES))
    assert said == said_more and bars.keys() == bars_more.keys()
    assert axes.get_ylim() == more.get_ylim() and named(axes) == named(more)
    assert (axes.figure.get_size_inches() == more.figure.get_size_inches()).all()


def test_ratios_need_a_correct_result_of_ours() -> None:
    others = [row("cudnn, dense", "4"), row("flex, dense", "5", "wrong")]
    for state, ms, words in (("wrong", "2", "2.000 ms, wrong"), ("crashed", "", "crashed")):
        axes, said, bars = drawn(row("ours", ms, state), *others)
        assert sorted(said) == ["4.000 ms", "5.000 ms, wrong"] and not bars
        assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"{FIRST}\n{words}"]
    axes, said, bars = drawn(*others)
    assert said and not bars
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"{FIRST}\nours: not measured"]


def test_every_peer_has_a_colour_of_its_own() -> None:
    pytest.importorskip("triton")
    colours = [*attention_figure.COLOURS.values(), attention_figure.GIVEN_COLOUR]
    assert len({to_rgba(c) for c in colours}) == len(colours)
    every = {p for name in SHAPES for p in bench_attention.peers_of(name, None, tuned=True)}
    assert every == {"ours", *attention_figure.COLOURS}
    others = {name: row(name, "3") for name in (*attention_figure.COLOURS, "mine")}
    axes, said, bars = drawn(row("ours", "2"), *others.values())
    assert len(bars) == len(said) == len(others)
    assert named(axes)[-1] == "mine (given kernel)"
    assert colour("flex, dense, tuned") in bars and colour("ours, sdpa path") in bars


def test_measured_rows_are_all_drawn(tmp_path: Path) -> None:
    """Those of the table that is committed, which has no notes."""
    file = tmp_path / "bench_attention.csv"
    file.write_bytes((RESULTS / file.name).read_bytes())
    rows = row_file.read(file)
    figure = attention_figure.figure_of(rows)
    texts = sum(len(axes.texts) for axes in figure.axes)
    assert texts == sum(r["peer"] != "ours" and r["state"] != NOT_INSTALLED for r in rows)
    attention_figure.draw(file)
    assert file.with_suffix(".png").stat().st_size > 10_000


def length(n: int, peer: str, ms: str, state: str = "ok") -> dict[str, str]:
    known = {"series": "plain", "n": str(n), "peer": peer, "median_ms": ms, "memory_mib": ms}
    return {**known, "state": state, "card": "none"}


def test_no_line_passes_over_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib import pyplot as plt

    figures: list[Any] = []
    make = plt.subplots

    def subplots(*args: Any, **kwargs: Any) -> Any:
        figures.append(make(*args, **kwargs))
        return figures[-1]

    monkeypatch.setattr(plt, "subplots", subplots)
    rows = [length(n, "ours", "1") for n in (256, 512, 1024)]
    for peer, state in (("cudnn, dense", "wrong"), ("flex, dense", "crashed"),
                        ("efficient, dense", bench_lengths.OUT_OF_MEMORY)):  # fmt: skip
        ms = "0.25" if state == "wrong" else ""
        rows += [length(256, peer, "2"), length(512, peer, ms, state), length(1024, peer, "3")]
    file = tmp_path / "rows.csv"
    row_file.write(file, bench_lengths.FIELDS, rows)
    bench_lengths.draw(file)
    ((figure, ((left, right),)),) = figures
    assert figure.get_suptitle().endswith("; x: out of memory; w: wrong; +: failed")
    for axes in (left, right):
        lines = {line.get_label(): line for line in axes.lines if len(line.get_xdata()) == 3}
        for peer in ("cudnn, dense", "flex, dense", "efficient, dense"):
            first, middle, last = lines[peer].get_ydata()
            assert (first, last) == (2, 3) and middle != middle  # which breaks the line
        marks = {line.get_marker() for line in axes.lines if len(line.get_xdata()) == 1}
        assert marks == {"x", "$w$", "+"}
    plt.close(figure)
