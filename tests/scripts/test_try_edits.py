"""Edits of the forward kernel: each still fits the kernel's text, and rows say what it is worth."""

from __future__ import annotations

import ast
import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import try_edits
from attention_shapes import SHAPES, SHORT
from kernel_edits import AS_IT_IS, EDITS, FORWARD, Edit
from row_file import RowFile


def kernels(folder: Path) -> dict[str, str]:
    """The text of the kernels of a copy, and that it parses."""
    found = {p.name: p.read_text() for p in (folder / "flashbias_convert/attention").glob("*.py")}
    for text in found.values():
        ast.parse(text)
    return found


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_the_files_that_it_names_and_no_other(name: str, tmp_path: Path) -> None:
    before = kernels(try_edits.copy_package(AS_IT_IS, tmp_path / "before"))
    after = kernels(try_edits.copy_package(name, tmp_path / "after"))
    changed = {file for file in before if before[file] != after[file]}
    assert changed == set(EDITS[name].changes)
    assert set(EDITS[name].shapes) <= SHAPES.keys() | SHORT.keys()


def test_text_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FORWARD).write_text("a b b")
    for text, everywhere in (("c", True), ("b", False)):
        edit = Edit("", {FORWARD: ((text, "d"),)}, (), everywhere)
        with pytest.raises(ValueError, match=f"{FORWARD} has '{text}'"):
            edit.apply(tmp_path)
    Edit("", {FORWARD: (("b", "d"),)}, (), True).apply(tmp_path)
    assert (tmp_path / FORWARD).read_text() == "a d d"


def test_the_kernel_as_it_is_comes_first() -> None:
    pairs = try_edits.wanted(["factors first"], ["triangle R=32", "pangu R=64"])
    shapes = ["pangu R=64", "triangle R=32"]
    assert pairs == [(edit, s) for edit in (AS_IT_IS, "factors first") for s in shapes]


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    results.mkdir()

    def save(edit: str, sample: torch.Tensor | None, **told: Any) -> None:
        row = {"shape": "s", "edit": edit, "card": "c", "torch": "t", "triton": "v", **told}
        torch.save((row, sample), results / edit)

    save("slower", torch.tensor([1.0, -3.5]), ms="4.0", state="ok", block_m=64)
    save(AS_IT_IS, torch.tensor([1.0, -3.0]), ms="2.0", state="ok", block_m=64)
    save("failed", None, state="OutOfResources")
    path = tmp_path / "edits.csv"
    try_edits.write(RowFile(path, try_edits.COLUMNS, key=("shape", "edit")), results)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["edit"] for row in rows] == [AS_IT_IS, "failed", "slower"]
    assert [row["gain"] for row in rows] == ["1.000", "", "0.500"]
    assert [row["difference"] for row in rows] == ["0.00e+00", "", "5.00e-01"]
    assert [row["largest"] for row in rows] == ["3.00e+00", "", "3.00e+00"]
    assert [row["state"] for row in rows] == ["ok", "OutOfResources", "ok"]
    assert "slower" in capsys.readouterr().out
