"""The script of the whole trunk, with four blocks: converted by the command line and loaded."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "paper"
sys.path.insert(0, str(SCRIPTS))

import trunk as script  # noqa: E402

from flashbias_convert.cli.app import run  # noqa: E402


def convert_here(folder: Path, output: Path) -> None:
    """The same command in this process: a new one would import all libraries again."""
    assert run(script.command(folder, output)) == 0


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    size = ["--blocks", "4", "--residues", "8", "--pair", "16", "--single", "16"]
    monkeypatch.setattr(script, "convert", convert_here)
    monkeypatch.setattr(sys, "argv", ["script", *size, "--output", str(tmp_path)])
    script.main()
    assert "12 of 12 sites converted" in capsys.readouterr().out
    with (tmp_path / "trunk.csv").open() as file:
        rows = {row["output"]: row for row in csv.DictReader(file)}
    assert len(rows) == 4
    for row in rows.values():
        assert row["bit_for_bit"] == "True" and row["sites"] == "12"
        # as assert_parity: twice the original's own error, or a rounding of the largest value
        allowed = 2 * float(row["original_error"]) + 2**-23 * float(row["largest"])
        assert float(row["error"]) <= allowed
        assert float(row["without_bias"]) > 100 * allowed
