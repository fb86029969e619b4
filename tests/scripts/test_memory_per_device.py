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
import on_devices
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


def test_rows_that_are_there_stay_and_those_of_a_card_are_added(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "out.csv"
    script.row_file.write(
        output,
        script.COLUMNS,
        [script.row(name, "weights", "DDP", 1, 7, "") for name in script.MODELS],
    )

    def on_card(name: str, *_: object) -> list[dict[str, object]]:
        found = script.row(name, "weights", script.ONE_CARD, 1, 7, 8)
        return [found | dict(zip(script.CARD, (9, 10, "a card"), strict=True))]

    monkeypatch.setattr(script, "measured", on_card)
    monkeypatch.setattr(script, "by_formula", lambda *_: pytest.fail("made again"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["script", "--tiny", "--resume", "--device", "cuda", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    for _ in range(2):
        assert script.main() == 0
        rows = script.row_file.read(output)
        assert [row["model"] for row in rows] == [n for n in script.MODELS for _ in range(2)]
        assert [row["card"] for row in rows] == ["", "a card"] * len(script.MODELS)
        monkeypatch.setattr(script, "measured", lambda *_: pytest.fail("measured again"))


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


@pytest.mark.parametrize("name", list(on_devices.SPREAD))
def test_what_is_measured_on_several_cards_runs_in_a_group(name: str) -> None:
    for spread in on_devices.SPREAD[name]:
        _, card = on_devices.on_devices(name, spread, 2, True, "cpu")
        assert card == f"none, {on_devices.FAKE} of 2"
