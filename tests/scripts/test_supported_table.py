"""The tables of supported architectures in the README are those of the recipes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashbias_convert.about import About
from scripts import supported_table
from tests.toy import make_recipe

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
    (_, _, row) = supported_table.converted_table([TOY]).split("\n")
    assert all(word in row for word in ("`toy`", "toys", "`BiasedAttention`", "all of it"))
    assert "1.0 to 1.3 |" in row
    assert len(supported_table.refused_table([TOY]).split("\n")) == 2


def test_a_readme_without_room_for_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs one line"):
        supported_table.with_tables("no marks", [TOY])


def test_a_recipe_must_describe_itself() -> None:
    with pytest.raises(ValueError, match="without `about`: toy"):
        supported_table.converted_table([replace(TOY, about=None)])


def test_all_columns_are_filled() -> None:
    for line in supported_table.converted_table(supported_table.installed()).split("\n"):
        assert len(re.split(r" ?\| ?", line)) == 9 and "|  |" not in line
