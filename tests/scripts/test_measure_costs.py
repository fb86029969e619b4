"""The script of costs by form, and the check of what is chosen with them; no kernel runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import check_choice
import measure_costs
import row_file

from flashbias_convert import Alibi, Dense, ScoreBias
from flashbias_convert.cost_tables import FIELDS

from .fake_pool import FakePool


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")


def test_costs_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, pool, timed = tmp_path / "costs.csv", FakePool(), []

    def time_ms(job: tuple[int, int, str]) -> float:
        timed.append(job)
        if len(timed) == 4:
            raise KeyboardInterrupt
        return 0.5

    def run(*words: str) -> list[dict[str, str]]:
        pool.jobs.clear()
        own = ["--lengths", "64", "--head-sizes", "32", "--workers", "1", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["script", *own, *words])
        measure_costs.main()
        return row_file.read(output)

    monkeypatch.setattr(measure_costs, "multiprocessing", pool)
    monkeypatch.setattr(measure_costs, "compile_one", lambda job: None)
    monkeypatch.setattr(measure_costs, "make_call", lambda *job: job)
    monkeypatch.setattr(measure_costs, "time_ms", time_ms)
    other = {"head_size": 32, "n": 64, "form": "none", "ms": 1, "ps_per_score": 1, "class": "ada",
             "card": "another", "torch": "1", "triton": "1"}  # fmt: skip
    row_file.write(output, FIELDS, [other])
    with pytest.raises(KeyboardInterrupt):
        run("--resume")
    rows = run("--resume")
    forms = measure_costs.forms_at(32)
    assert forms[-2:] == ["dense, shared", measure_costs.SDPA]
    assert "dense, shared" not in measure_costs.forms_at(64)
    assert [(r["class"], r["form"]) for r in rows] == [
        ("ada", "none"), *(("hopper", form) for form in forms)
    ]  # fmt: skip
    assert [form for *_, form in timed] == [*forms[:4], *forms[3:]]
    assert [job for (job,) in pool.jobs] == timed[4:]
    scores = measure_costs.shape_of(64, 32).batch[0] * measure_costs.HEADS * 64**2
    assert float(rows[1]["ps_per_score"]) == pytest.approx(0.5e9 / scores, rel=1e-3)
    assert run("--resume") == rows and not pool.jobs
    rows[2]["card"] = "another of its class"  # its cost would be read beside the new one
    row_file.write(output, FIELDS, rows)
    again = run("--resume")
    assert len(again) == len(rows) and timed[-1][2] == forms[1] == again[-1]["form"]


def test_choices_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Site by site: the forms of one are compared with each other."""
    sites = [check_choice.Site(name, torch.randn(1, 4, 4), 16) for name in ("first", "second")]
    dense = ScoreBias((Dense(bias=torch.zeros(1, 4, 4)),), 1)
    choice: dict[str, Any] = {"first": dense, "second": dense}
    timed: list[str] = []

    def time_ms(name: str) -> float:
        timed.append(name)
        if len(timed) == 4:
            raise KeyboardInterrupt
        return {"first": 1.0, "second": 2.0}[name] * (1 + len(timed) % 2)

    def run() -> list[tuple[str, str, str, str]]:
        words = ["script", "--resume", "--output", str(tmp_path / "table.csv")]
        monkeypatch.setattr(sys, "argv", words)
        check_choice.main()
        rows = row_file.read(tmp_path / "table.csv")
        return [(r["site"], r["form"], r["terms"], r["share"]) for r in rows]

    monkeypatch.setattr(check_choice, "trained", lambda: iter(sites))
    monkeypatch.setattr(check_choice, "made", lambda: iter(()))
    monkeypatch.setattr(
        check_choice, "forms", lambda site: {"choice": choice[site.name], "dense": dense}
    )
    monkeypatch.setattr(check_choice, "make_call", lambda site, _: site.name)
    monkeypatch.setattr(check_choice, "time_ms", time_ms)
    with pytest.raises(KeyboardInterrupt):
        run()
    both = [("first", "choice", "dense", "2.000"), ("first", "dense", "dense", "1.000")]
    rows = run()
    assert rows[:2] == both and [r[0] for r in rows] == ["first"] * 2 + ["second"] * 2
    assert timed == ["first", "first", *["second"] * 4]
    assert "0 of 2 choices within" in capsys.readouterr().out
    assert run() == rows and len(timed) == 6
    choice["second"] = ScoreBias((Alibi(slopes=torch.ones(1)),), 1)
    changed = run()
    assert timed[6:] == ["second"] * 2 and changed[2][2] == "alibi" and len(changed) == 4
