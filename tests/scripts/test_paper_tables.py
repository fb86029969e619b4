"""Tables of the paper beside rows of ours: measured, or taken from files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "paper")]

from paper_tables import PaperTable, Published, taken  # noqa: E402
from whole_models import figure, plain, running, writing  # noqa: E402

from .turns_here import in_turns_here  # noqa: E402


def test_a_table_of_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    table = PaperTable(
        "x", "x", "s per 100 calls", 0.1, lambda tiny: [plain.cases(tiny)["plain-20"]],
        {"exact": Published("FlashBias", 39.26, 0.49)}, ("none", "exact"), by_length=True,
    )  # fmt: skip
    path = tmp_path / "paper.csv"
    arguments = ["x", "--tiny", "--device", "cpu", "--repeats", "1", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(running, "in_turns", in_turns_here)
    table.main("x")
    none, exact = writing.read_rows(path)
    assert float(none["delta"]) == 0 and none["paper_time"] == ""
    assert (exact["paper_row"], exact["paper_time"], exact["paper_delta"]) == (
        "FlashBias", "39.26", "0.49",
    )  # fmt: skip
    ratio = float(exact["median_ms"]) / float(none["median_ms"])
    assert float(exact["ratio_to_no_bias"]) == pytest.approx(ratio, rel=1e-3)
    assert float(exact["time"]) == pytest.approx(0.1 * float(exact["median_ms"]), rel=1e-3)
    assert path.with_suffix(".png").stat().st_size > 0


def test_a_table_of_rows_that_others_have_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def row(variant: str, ms: str, status: str = "measured", model: str = "") -> dict[str, str]:
        model = model or "plain Transformer 20"
        return {"model": model, "variant": variant, "mode": "eager", "median_ms": ms,
                "tokens": "20", "status": status, "device": "card", "dtype": "d",
                "batch": "1"}  # fmt: skip

    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    for path, rows in {
        first: [row("flex", "4"), row("none", "2"), row("exact", "", "failed")],
        second: [row("exact", "3"), row("sdpa", "1", "wrong"), row("none", "", "failed"),
                 row("exact", "7", model="another")],
    }.items():  # fmt: skip
        table = writing.Table(path)
        for one in rows:
            table.add(one)
    paper = PaperTable(
        "x", "x", "ms", 1.0, lambda tiny: [plain.cases(tiny)["plain-20"]],
        {"exact": Published("FlashBias", 39.26)}, ("none", "exact", "sdpa", "flex"),
        bare={"flex": "exact"},
    )  # fmt: skip
    path = tmp_path / "paper.csv"
    arguments = ["x", "--tiny", "--output", str(path), "--rows", str(first), str(second)]
    monkeypatch.setattr(sys, "argv", arguments)
    paper.main("x")
    found = writing.read_rows(path)
    assert [(r["variant"], r["median_ms"], r["delta"]) for r in found] == [
        ("none", "2", "0"), ("exact", "3", "1"), ("sdpa", "1", ""), ("flex", "4", "1"),
    ]  # fmt: skip
    assert found[1]["paper_time"] == "39.26"
    assert path.with_suffix(".png").stat().st_size > 0
    passage = path.with_suffix(".md").read_text()
    assert "card, d, batch 1" in passage and "39.26" in passage

    third = writing.Table(tmp_path / "c.csv")
    for variant, ms in (("none-cudnn-compiled", "2"), ("exact-compiled", "5")):
        third.add(row(variant, ms))
    monkeypatch.setattr(sys, "argv", [*arguments[:5], str(third.path), "--variants", "*-compiled"])
    paper.main("x")
    found = writing.read_rows(path)
    assert [(r["delta"], r["paper_time"]) for r in found] == [("0", ""), ("3", "39.26")]

    monkeypatch.setattr(sys, "argv", arguments)
    writing.Table(first).add({**row("flex", "4"), "device": "another card"})
    with pytest.raises(SystemExit):
        paper.main("x")


@pytest.mark.parametrize("name", ["overall_efficiency", "pangu", "swinv2_b"])
def test_every_row_that_is_measured_is_in_its_table(name: str) -> None:
    table = importlib.import_module(name).TABLE
    cases = table.cases(False)
    rows = writing.read_rows(SCRIPTS / "results/bench_models.csv")
    measured = {
        (row["model"], row["variant"])
        for row in rows
        if row["model"] in {case.name for case in cases} and row["mode"] in ("eager", "compiled")
    }
    found = taken(rows, cases, table.variants)
    assert measured and {(row["model"], row["variant"]) for row in found} == measured
    committed = writing.read_rows(SCRIPTS / f"results/paper/{name}.csv")
    assert [
        (r["variant"], r["median_ms"]) for r in committed if r["mode"] in ("eager", "compiled")
    ] == [(r["variant"], r["median_ms"]) for r in found]


def test_what_the_paper_says_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of figures that have no numbers: beside the row, and above the picture."""
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    monkeypatch.setattr(figure, "draw_lengths", lambda rows, path, title: drawn.append(title))
    said = {"plain Transformer 20: exact": Published("FlashBias", note="44 % faster")}
    table = PaperTable(
        "x", "x", "ms", 1.0, lambda tiny: [plain.cases(tiny)["plain-20"]],
        said, ("exact-graphs",), by_length=True,
    )  # fmt: skip
    rows = writing.Table(tmp_path / "rows.csv")
    where = {"model": "plain Transformer 20", "tokens": "20", "device": "card", "dtype": "d"}
    rows.add({**where, "variant": "exact-graphs", "median_ms": "1", "status": "measured"})
    words = ["x", "--tiny", "--output", str(tmp_path / "x.csv"), "--rows", str(rows.path)]
    monkeypatch.setattr(sys, "argv", words)
    table.main("x")
    assert drawn == ["x; the paper, A100, plain Transformer 20: 44 % faster"]
    assert "| 44 % faster |" in (tmp_path / "x.md").read_text()


def test_the_paper_stands_beside_eager_rows_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    table = PaperTable(
        "x", "x", "ms", 1.0, lambda tiny: [plain.cases(tiny)["plain-20"]],
        {"sdpa": Published("FlashAttention with Bias", 40.32)},
        ("sdpa", "sdpa-cudnn", "sdpa-compiled"),
    )  # fmt: skip
    rows = writing.Table(tmp_path / "rows.csv")
    for variant in ("sdpa-compiled", "sdpa-cudnn"):
        where = {"model": "plain Transformer 20", "tokens": "20", "device": "card", "dtype": "d"}
        rows.add({**where, "variant": variant, "median_ms": "1", "status": "measured"})
    path = tmp_path / "x.csv"
    words = ["x", "--tiny", "--output", str(path), "--rows", str(rows.path)]
    monkeypatch.setattr(sys, "argv", words)
    table.main("x")
    found = {row["variant"]: row["paper_time"] for row in writing.read_rows(path)}
    assert found == {"sdpa-cudnn": "40.32", "sdpa-compiled": ""}
