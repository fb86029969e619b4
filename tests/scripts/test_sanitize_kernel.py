"""Runs of the sanitizer that need not be made again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import sanitize_kernel as script

WHERE = {"card": "A", "torch": "2"}


def test_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finding is kept, want of time is not; nor is another card, or other calls."""
    made: list[tuple[str, bool]] = []
    problems: dict[str, list[str]] = {}

    def under(tool: str, _: str, backward: bool, __: float) -> dict[str, Any]:
        if tool == "ends":
            raise KeyboardInterrupt
        made.append((tool, backward))
        told = problems.get(tool, [])
        return {"tool": tool, "backward": backward, "clean": not told,
                "of": len(script.cases()), "problems": told}  # fmt: skip

    def run(*tools: str, backward: bool = True, where: dict[str, str] = WHERE) -> list[bool]:
        made.clear()
        options = argparse.Namespace(
            tools=tools, backward=backward, timeout=1.0, resume=True, output=tmp_path / "found.json"
        )
        return [row["clean"] for row in script.run_all("sanitizer", options, where)]

    monkeypatch.setattr(script, "under", under)
    problems["racecheck"] = ["a hazard"]
    problems["slow"] = ["a hazard", f"{script.NOT_DONE} 1 s"]
    with pytest.raises(KeyboardInterrupt):
        run("memcheck", "racecheck", "slow", "ends")
    assert [tool for tool, _ in made] == ["memcheck", "racecheck", "slow"]
    del problems["slow"]
    assert run("memcheck", "racecheck", "slow") == [True, False, True]
    assert made == [("slow", True)]
    assert run("memcheck", backward=False) == [True] and made == [("memcheck", False)]
    assert run("memcheck", "racecheck") == [True, False] and not made
    assert len(json.loads((tmp_path / "found.json").read_text())["runs"]) == 4
    monkeypatch.setattr(script, "cases", lambda: [(1, 1, "float16", "none")])
    run("memcheck")
    assert made == [("memcheck", True)]
    run("memcheck", where={**WHERE, "torch": "3"})
    assert made == [("memcheck", True)]
    assert "runs of A, 2 are made again" in capsys.readouterr().out
