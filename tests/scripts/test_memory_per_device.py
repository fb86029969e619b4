"""Memory by formula and as allocated, of models small enough for a test."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

pytest.importorskip("timm")
pytest.importorskip("transformers")

import memory_per_device as script
import on_one_card


def test_help_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "RESULTS", tmp_path / "memory.csv")
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0 and not any(tmp_path.iterdir())


def test_small_models_take_what_the_formulas_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept, output = tmp_path / "kept.csv", tmp_path / "out.csv"
    monkeypatch.setattr(script, "RESULTS", kept)
    monkeypatch.setattr(sys, "argv", ["script", "--tiny", "--output", str(output)])
    assert script.main() == 0 and not kept.exists()
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {*script.SPLIT, "Pairformer"}
    assert tuple(rows[0]) == script.COLUMNS  # none of a card
    made = [row for row in rows if row["allocated_bytes"]]
    assert made and all(row["allocated_bytes"] == row["formula_bytes"] for row in made)


@pytest.mark.parametrize("name", [*script.SPLIT, "Pairformer"])
def test_what_is_measured_on_a_card_runs(name: str) -> None:
    for what, load, call, count in on_one_card.cases(name, True, "cpu"):
        model = load()
        assert all(p.dtype == torch.bfloat16 for p in model.parameters()), what
        with torch.no_grad():
            call(model)
        assert count in (1, 70)


def test_layers_that_follow_each_other_add_up() -> None:
    assert on_one_card.OnCard(10, 12, 15).times(70) == on_one_card.OnCard(700, 702, 705)
