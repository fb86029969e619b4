"""The tables of supported architectures in the README are those of the recipes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from whole_models import families, foreign, writing
from whole_models.parts import Sizes

from flashbias_convert.about import About
from scripts import supported_table
from tests.toy import make_recipe

#: what they compute is measured of another recipe
TOY = replace(make_recipe(tested=">=1.0,<1.4"), about=About("toys", exact="all of it"))


def test_the_readme_is_up_to_date() -> None:
    text = supported_table.README.read_text()
    fresh = supported_table.with_tables(text, supported_table.installed())
    assert text == fresh, "run python scripts/supported_table.py"


def test_every_recipe_is_in_one_of_the_tables() -> None:
    text = supported_table.README.read_text()
    for recipe in supported_table.installed():
        assert recipe.about is not None and recipe.about.models in text
        assert bool(recipe.about.exact) != bool(recipe.about.refused), recipe.name


def test_check_says_whether_the_readme_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(supported_table.README.read_text().replace("| `timm_swin` |", "| `old` |"))
    stale = readme.read_text()
    monkeypatch.setattr(supported_table, "README", readme)
    monkeypatch.setattr(sys, "argv", ["supported_table.py", "--check"])
    assert supported_table.main() == 1 and readme.read_text() == stale
    assert "stale" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["supported_table.py"])
    assert supported_table.main() == 0 and readme.read_text() != stale
    monkeypatch.setattr(sys, "argv", ["supported_table.py", "--check"])
    assert supported_table.main() == 0


def test_a_row_says_what_the_recipe_says() -> None:
    (_, _, row) = supported_table.converted_table([TOY], {}).split("\n")
    assert all(word in row for word in ("`toy`", "toys", "`BiasedAttention`", "all of it"))
    assert "1.0 to 1.3 |" in row
    assert len(supported_table.refused_table([TOY]).split("\n")) == 2


def test_a_readme_without_room_for_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs one line"):
        supported_table.with_tables("no marks", [TOY])


def test_a_recipe_must_describe_itself() -> None:
    with pytest.raises(ValueError, match="without `about`: toy"):
        supported_table.converted_table([replace(TOY, about=None)], {})


def test_all_columns_are_filled() -> None:
    for line in supported_table.converted_table(supported_table.installed(), {}).split("\n"):
        assert len(re.split(r" ?\| ?", line)) == 10 and "|  |" not in line


def row(model: str, variant: str, time: str, device: str = "NVIDIA H200", **more: str) -> Any:
    known = {"model": model, "variant": variant, "median_ms": time, "device": device}
    return {"dtype": "bfloat16", "status": "measured", **known, **more}


def test_gains_are_those_of_the_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "families.csv"
    assert supported_table.measured_gains(path) == {}
    table = writing.Table(path)  # its columns are what is read
    for made in (
        row("toy, small", "original-compiled", "9.0"), row("toy, small", "ours-compiled", "5.0"),
        row("toy, small", "original", "1.0"), row("toy, large", "original-compiled", "3.0"),
        row("toy, large", "ours-compiled", "2.0"),
        row("toy, small", "original-compiled", "4.0", "NVIDIA H100 80GB HBM3", dtype="float16"),
        row("toy, small", "ours-compiled", "2.0", "NVIDIA H100 80GB HBM3", dtype="float16"),
        row("failed, x", "original-compiled", "4.0"),
        row("failed, x", "ours-compiled", "", status="failed"),
        row("slow, x", "original-compiled", "4.0", "cpu"),
        row("slow, x", "ours-compiled", "1.0", "cpu"),
    ):  # fmt: skip
        table.add(made)
    assert supported_table.measured_gains(path) == {"toy": "1.5x, H200, bf16; 2.0x, H100, fp16"}
    (_, _, last) = supported_table.converted_table(
        [TOY], supported_table.measured_gains(path)
    ).split("\n")
    assert "| 1.5x, H200, bf16; 2.0x, H100, fp16 |" in last
    assert "| not measured |" in supported_table.converted_table([TOY], {})


def test_gains_of_cuda_graphs_come_first(tmp_path: Path) -> None:
    """Of several models the smallest of each; a model without a graph says nothing of graphs."""
    path = tmp_path / "families.csv"
    table = writing.Table(path)
    for model, ours, graphs in (("a, x", "5.0", ("4.0", "2.0")), ("a, y", "1.0", ("3.0", "2.0"))):
        table.add(row(model, "original-compiled", "2.0") | {"replay_ms": graphs[0]})
        table.add(row(model, "ours-compiled", ours) | {"replay_ms": graphs[1]})
    table.add(row("b, x", "original-compiled", "2.0") | {"replay_ms": "1.0"})
    table.add(row("b, x", "ours-compiled", "1.0"))
    found = supported_table.measured_gains(path)
    assert found == {"a": "1.5x / 0.40x, H200, bf16", "b": "2.0x, H200, bf16"}


def test_what_torch_fails_to_compile_is_compared_in_eager_mode(tmp_path: Path) -> None:
    path = tmp_path / "families.csv"
    table = writing.Table(path)
    table.add(row("a, x", "original-compiled", "", status="failed"))
    table.add(row("a, x", "ours-compiled", "1.0") | {"replay_ms": "0.5"})
    table.add(row("a, x", "original", "3.0"))
    found = supported_table.measured_gains(path)
    assert found == {"a": "3.0x, H200, bf16, the original in eager mode"}


def test_the_faster_original_counts(tmp_path: Path) -> None:
    """One is faster on the card, the other in calls; a wrong one is none."""
    path = tmp_path / "families.csv"
    table = writing.Table(path)
    table.add(row("a, x", "ours-compiled", "2.0") | {"replay_ms": "1.0"})
    table.add(row("a, x", "original-compiled", "6.0") | {"replay_ms": "5.0"})
    table.add(row("a, x", "original-fused-compiled", "8.0") | {"replay_ms": "2.0"})
    table.add(row("b, x", "ours-compiled", "2.0"))
    table.add(row("b, x", "original-compiled", "6.0"))
    table.add(row("b, x", "original-fused-compiled", "3.0", status="wrong"))
    table.add(row("c, x", "ours-compiled", "2.0"))
    table.add(row("c, x", "original-fused-compiled", "3.0"))
    found = supported_table.measured_gains(path)
    where = "H200, bf16"
    assert found == {"a": f"2.0x / 3.0x, {where}", "b": f"3.0x, {where}", "c": f"1.5x, {where}"}


def test_a_new_measurement_makes_the_readme_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "families.csv"
    table = writing.Table(path)
    for variant, time in (("original-compiled", "77.7"), ("ours-compiled", "1.0")):
        table.add(row("timm_swin, base", variant, time))
    monkeypatch.setattr(supported_table, "MEASURED", path)
    recipes = supported_table.installed()
    assert "77.7x" in supported_table.with_tables(supported_table.README.read_text(), recipes)


def test_models_that_are_measured_are_called_by_their_recipes() -> None:
    names = {recipe.name for recipe in supported_table.installed() if recipe.converts}
    measured = {case.name.partition(",")[0] for case in families.cases().values()}
    assert measured <= names
    # of these the library is not among the dependencies: there is a case where it is installed
    absent = {name for name in foreign.recipes() if not foreign.available(name)}
    assert names - measured == absent


def test_libraries_that_are_not_there_leave_no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (False, True):
        monkeypatch.setattr(foreign, "available", lambda _, there=there: there)
        found = {name.partition(",")[0] for name in foreign.parts(Sizes(tiny=True))}
        assert found == (foreign.recipes() if there else set())


def test_recipes_of_other_libraries_are_named_in_the_readme() -> None:
    text = supported_table.README.read_text()
    after = text[text.index(supported_table.MARKS[1].format("supported")) :]
    assert all(f"`{name}`" in after for name in foreign.recipes())
