"""The script of training costs, at sizes at which nobody is timed seriously."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import measure_training_costs as script  # noqa: E402
import row_file  # noqa: E402

from flashbias_convert.attention import training_costs  # noqa: E402
from flashbias_convert.attention.arguments import check_arguments  # noqa: E402
from flashbias_convert.attention.backends import columns_alone  # noqa: E402
from flashbias_convert.attention.training_packing import training_columns  # noqa: E402
from flashbias_convert.cost_tables import FIELDS  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _the_committed_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The script looks at what it wrote; nobody else does."""
    monkeypatch.setattr(training_costs, "TABLE", training_costs.TABLE)
    yield
    training_costs._table.cache_clear()


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *words: str) -> list[dict[str, str]]:
    words = ("--tiny", "--device", "cpu", "--output", str(output), *words)
    monkeypatch.setattr(sys, "argv", ["script", *words])
    script.main()
    with output.open() as file:
        return list(csv.DictReader(file))


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of other cards and dtypes stay; without a card only torch's attention has new ones."""
    if INTERPRETED:
        pytest.skip("the smallest size is for a CPU without the interpreter")
    output = tmp_path / "costs.csv"
    others = [
        {"head_size": 64, "n": 256, "form": f"sdpa, {dtype}, 0 columns", "ps_per_score": 1.0,
         "class": of_class}
        for dtype, of_class in (("float32", "hopper"), ("bfloat16", "cpu"), ("float32", "cpu"))
    ]  # fmt: skip
    row_file.write(output, FIELDS, others)
    rows = run(monkeypatch, output)
    assert [r["class"] for r in rows[:2]] == ["hopper", "cpu"]
    new = rows[2:]
    assert {r["class"] for r in new} == {"cpu"} and all(float(r["ms"]) > 0 for r in new)
    forms = {r["form"] for r in new}
    assert forms == {
        "sdpa, float32, 0 columns", "sdpa, float32, 0 columns, causal", "sdpa, float32, key bias",
        "sdpa, float32, key bias, trained", "sdpa, float32, 24 columns",
        "sdpa, float32, 24 columns, trained", "sdpa, float32, 24 columns, trained, causal",
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "D = 16, float32, 16 columns, trained: " in said
    assert "not measured: as asked for" in said


def test_it_says_what_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"head_size": 16, "n": n, "form": f"{way}, float32, 0 columns", "ps_per_score": cost,
         "class": "cpu"}
        for way, n, cost in (("triton", 16, 1.0), ("triton", 64, 2.0), ("sdpa", 16, 2.0),
                             ("sdpa", 64, 1.0))
    ]  # fmt: skip
    row_file.write(tmp_path / "costs.csv", FIELDS, rows)
    monkeypatch.setattr(sys, "argv", ["script", "--tiny", "--device", "cpu"])
    first, *_ = script.told(tmp_path / "costs.csv", script.arguments())
    assert first == "D = 16, float32, 0 columns: triton to N = 31, sdpa"


def test_the_clock_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row_file.write(tmp_path / "costs.csv", FIELDS, [])
    assert run(monkeypatch, tmp_path / "costs.csv", "--stop-s", "-1") == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_columns_are_those_of_the_name(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a row would stand for other calls than the rule takes it for."""
    monkeypatch.setattr(sys, "argv", ["script", "--device", "cpu", "--lengths", "8"])
    options = script.arguments()
    options.dtypes = [dtype]
    for job in script.jobs_of(options):
        term = job._term(torch.device("cpu"))
        if job.columns <= 0 or term is None:
            continue
        bias = script.ScoreBias((term,), script.HEADS)
        q = torch.empty(1, script.HEADS, 8, job.d, dtype=getattr(torch, dtype))
        args = check_arguments(
            q, q, q, scale=None, causal=False, query_start=None, key_mask=None, cosine=False
        )
        own = columns_alone(q, bias, args)
        found = own if job.way == "sdpa" else training_columns(bias, half=True)
        assert found == job.columns, job


def test_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written one by one; those of other versions are replaced where they are measured."""
    output, timed = tmp_path / "costs.csv", []

    def time_ms(job: script.Job) -> float:
        timed.append(job)
        if len(timed) == 3:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(script, "time_ms", time_ms)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, output)
    first = row_file.read(output)
    assert [r["form"] for r in first] == [job.form for job in timed[:2]]
    rows = run(monkeypatch, output, "--resume")
    every = [job.form for job in script.jobs_of(script.arguments())]
    assert rows[:2] == first and [r["form"] for r in rows] == every
    assert [job.form for job in timed[3:]] == every[2:]
    rows[3]["torch"] = "1.0"
    row_file.write(output, FIELDS, rows)
    timed[:] = timed[:3]
    again = run(monkeypatch, output, "--resume")
    assert len(timed) == 4 and len(again) == len(rows) and again[-1]["torch"] == torch.__version__
