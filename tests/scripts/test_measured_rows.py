"""Rows of the scripts for whole models: how they are measured, told and gone on with."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import assert_parity

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "paper")]

import bench_models  # noqa: E402
from turns import BESIDE  # noqa: E402
from whole_models import (  # noqa: E402
    language,
    measuring,
    plain,
    running,
    static_bias,
    truth,
    vision,
    weather,
    writing,
)  # fmt: skip
from whole_models.case import BY_ROWS, NO_BIAS, Case  # noqa: E402

from .turns_here import in_turns_here  # noqa: E402

CPU = torch.device("cpu")
OPTIONS = truth.Options(CPU, torch.bfloat16, repeats=1)
pytestmark = pytest.mark.filterwarnings("ignore")


class Slow(nn.Module):
    def forward(self, seconds: float) -> Tensor:
        time.sleep(seconds)
        return torch.zeros(1)


def slow(seconds: float, problem: Exception | None = None) -> Case:
    def inputs(*_: Any) -> Any:
        if problem is not None:
            raise problem
        return (seconds,), {}

    return Case("slow", 1, 1, ("original",), lambda _: Slow(), inputs, lambda m, _: m, ("eager",))


def test_no_converted_family_is_slower_than_its_original() -> None:
    """Of committed rows, compiled: what a plan converts; originals with what they can switch on."""
    rows = rows_by_model("bench_families.csv")
    converted = {model: own for model, own in rows.items() if "ours-compiled" in own}
    readme = (SCRIPTS.parent / "README.md").read_text()
    assert f"Of {len(converted)} models that a plan converts" in readme
    for model, own in converted.items():
        ours = own["ours-compiled"]
        assert ours["status"] == "measured", model
        for name in ("original-compiled", "original-fused-compiled"):
            other = own.get(name, {})
            for column in ("median_ms", "replay_ms"):
                if other.get(column) and ours[column]:
                    assert float(ours[column]) <= float(other[column]), (model, name, column)


def rows_by_model(name: str) -> dict[str, dict[str, dict[str, str]]]:
    """Rows of a committed table, by model and variant."""
    rows: dict[str, dict[str, dict[str, str]]] = {}
    for row in csv.DictReader((SCRIPTS / "results" / name).open(newline="")):
        rows.setdefault(row["model"], {})[row["variant"]] = row
    return rows


@pytest.mark.parametrize("mode", ["compiled", "graphs"])
def test_no_converted_model_is_slower_than_its_original(mode: str) -> None:
    """As a plan has it: exactly, or by `auto`."""
    compared = 0
    for model, own in rows_by_model("bench_models.csv").items():
        original = own.get(f"original-{mode}", {})
        for way in ("exact", "ours"):
            ours = own.get(f"{way}-{mode}", {})
            for column in ("median_ms", "replay_ms"):
                if original.get(column) and ours.get(column):
                    assert float(ours[column]) <= float(original[column]), (model, way, column)
                    compared += 1
    assert compared >= (10 if mode == "compiled" else 3)


def test_the_published_mpnet_is_at_least_half_as_fast_again() -> None:
    rows = rows_by_model("bench_mpnet.csv")
    assert set(rows) == {f"MPNet, all-mpnet-base-v2, {d}" for d in ("float16", "bfloat16")}
    for model, own in rows.items():
        for mode in ("", "-compiled"):
            original, ours = (own[f"{way}{mode}"] for way in ("original", "ours"))
            assert (ours["batch"], ours["tokens"], ours["status"]) == ("64", "512", "measured")
            ratio = float(original["median_ms"]) / float(ours["median_ms"])
            assert ratio >= 1.5, (model, mode)


def test_rows_that_fail_say_why() -> None:
    nothing = truth.Truth(None, None, "none")
    limited = truth.Options(CPU, torch.float32, 1, limit_s=0.2)
    row = measuring.measure_row(slow(30), "original", limited, nothing)
    assert (row["status"], row["reason"]) == ("failed", "over the limit of 0.2 s")
    problem = torch.OutOfMemoryError("all of it")
    row = measuring.measure_row(slow(0, problem), "original", OPTIONS, nothing)
    assert (row["status"], row["reason"]) == ("failed", "out of memory")
    row = measuring.measure_row(slow(0), "original", OPTIONS, nothing)
    assert row["status"] == "measured" and float(row["median_ms"]) >= 0


def test_strides_are_padded_but_of_models_that_compilers_get_wrong() -> None:
    from torch._inductor import config

    seen, nothing = [], truth.Truth(None, None, "none")

    class Looks(nn.Module):
        def forward(self, seconds: float) -> Tensor:
            seen.append(config.comprehensive_padding)
            return torch.zeros(1)

    before = config.comprehensive_padding
    for padded in (True, False):
        case = dataclasses.replace(slow(0), build=lambda _: Looks(), pads_strides=padded)
        row = measuring.measure_row(case, "original", OPTIONS, nothing)
        assert row["status"] == "measured" and set(seen) == {padded and before}
        seen.clear()
    assert config.comprehensive_padding == before


def test_waiting_for_a_turn_does_not_count_against_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While others have their turns no clock runs, which is what could end this."""
    nothing, clocks = truth.Truth(None, None, "none"), []

    def wait() -> None:
        clocks.append(signal.getitimer(signal.ITIMER_REAL)[0])

    limited = truth.Options(CPU, torch.float32, 1, limit_s=60.0)
    row = measuring.measure_row(slow(0), "original", limited, nothing, wait)
    assert row["status"] == "measured"
    assert clocks == [0.0]


def test_every_row_is_written_by_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {"slow": slow(0), "broken": slow(0, RuntimeError("no")), "dead": slow(0)}
    named = [dataclasses.replace(case, name=name) for name, case in cases.items()]
    turns: list[str] = []

    def in_turns(job: Any, calls: Any, **_: Any) -> Any:
        if job is running.measure_job and calls[-1][0].model == "dead":
            lost, calls = calls[-1:], calls[:-1]
        else:
            lost = []
        for (call,) in calls:
            job(call, lambda name=f"{job.__name__} {call.model}": turns.append(name))
        return lost

    monkeypatch.setattr(running, "in_turns", in_turns)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # of this process, not what a job makes of it
    for together in (1, 3):
        turns.clear()
        options = argparse.Namespace(device="cpu", dtype="float32", repeats=1, limit_s=0.0,
                                     stop_s=0.0, tiny=True, variants=None,
                                     together=together)  # fmt: skip
        table = writing.Table(tmp_path / f"{together}.csv", ("more",))
        more = {(name, "original"): {"more": name} for name in cases}
        running.run_apart(lambda _: named, options, table, more=more)
        # each has its turn once, however it ends
        assert [t for t in turns if "measure" in t] == ["measure_job slow", "measure_job broken"]
        assert sorted(t for t in turns if "truth" in t) == [f"truth_job {n}" for n in sorted(cases)]
        told = {row["model"]: (row["status"], row["reason"]) for row in table.rows}
        assert told["slow"][0] == "measured"
        assert told["broken"][0] == "failed" and "no" in told["broken"][1]
        assert told["dead"] == ("failed", "its process died")
        assert [row["more"] for row in writing.read_rows(table.path)] == list(cases)


def test_the_truth_is_found_once_for_all_rows_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[str] = []

    def in_turns(job: Any, calls: Any, **_: Any) -> Any:
        for (call,) in calls:
            jobs.append(job.__name__)
            job(call, measuring.at_once)
        return []

    monkeypatch.setattr(running, "in_turns", in_turns)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # of this process, not what a job makes of it
    options = argparse.Namespace(device="cpu", dtype="bfloat16", repeats=1, limit_s=0.0,
                                 stop_s=0.0, tiny=True, variants=["original", "exact"],
                                 together=1)  # fmt: skip
    table = writing.Table(tmp_path / "rows.csv")
    running.run_apart(lambda tiny: [plain.cases(tiny)["plain-20"]], options, table)
    assert jobs == ["truth_job", "measure_job", "measure_job"]
    known = truth.find_truth(plain.cases(True)["plain-20"], OPTIONS)
    own = measuring.measure_row(plain.cases(True)["plain-20"], "original", OPTIONS, known)
    assert table.rows[0]["error_rms"] == own["error_rms"] and table.rows[0]["truth"] == known.how


def test_a_truth_that_nobody_wrote_is_none(tmp_path: Path) -> None:
    missing = truth.load_truth(tmp_path / "no.pt")
    assert missing.wide is None and "died" in missing.how


def test_a_card_that_is_dead_after_a_row_leaves_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = RuntimeError("CUDA error: an illegal memory access was encountered")

    def release(_: torch.device) -> None:
        raise gone

    monkeypatch.setattr(measuring, "release", release)
    row = measuring.measure_row(slow(0, gone), "original", OPTIONS, truth.Truth(None, None, "none"))
    assert row["status"] == "failed" and "illegal memory access" in row["reason"]


@pytest.mark.parametrize("key", ["gpt2-decode-2k", "gpt2-decode-2k-growing", "gpt2-prefill-2k"])
def test_a_warm_call_changes_no_input(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "compiled", lambda model, mode: model)
    case = language.cases(True)[key]
    known = truth.find_truth(case, OPTIONS)
    cold, warm = (measuring.measure_row(case, v, OPTIONS, known) for v in ("exact", "exact-warm"))
    assert warm["error_rms"] == cold["error_rms"] and warm["within_rounding"] == "True"


def test_blocks_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: found.append(type(self).__name__))
    blocks = {
        vision.cases(True)["swinv2-b"]: ("SwinTransformerV2Block", 3),
        weather.cases(True)["pangu"]: ("EarthSpecificBlock", 8),
        plain.cases(True)["plain-20"]: ("Layer", 2),
        language.cases(True)["gpt2-prefill-2k"]: ("AlibiGPT2Block", 2),
    }
    for case, (name, count) in blocks.items():
        found.clear()
        measuring.compiled(case.prepare("exact", CPU, torch.float32).model, "layers")
        assert found == [name] * count


def test_a_row_tells_its_error_beside_rounding() -> None:
    case = plain.cases(True)["plain-20"]
    known = truth.find_truth(case, OPTIONS)
    assert known.how == "original in float32"
    rows = {
        v: measuring.measure_row(case, v, OPTIONS, known) for v in ("original", "exact", "none")
    }
    assert rows["original"]["error_rms"] == rows["original"]["rounding_rms"]
    assert rows["exact"]["within_rounding"] == "True"
    assert rows["none"]["within_rounding"] == "another function"
    assert float(rows["none"]["error_rms"]) > 10 * float(rows["none"]["rounding_rms"])


def test_a_row_that_computes_something_else_is_wrong() -> None:
    wide = torch.linspace(-1, 1, 64, dtype=torch.float32)
    plain_ = wide + 1e-2 * torch.tensor([1.0, -1.0]).repeat(32)  # rounding of 1e-2, its rms as well
    known = truth.Truth({"": wide}, {"": plain_}, "here")

    def row(error: float, way: str = "flex", **how: bool) -> dict[str, Any]:
        return truth.errors_of({"": wide + error}, known, torch.bfloat16, way, **how)

    # allowed: twice the rounding and a unit in the last place of the root mean square of the
    # outputs, 2**-7 * 0.59; wrong: twice that
    assert "status" not in row(0.02) and row(0.02)["within_rounding"] == "True"
    assert "status" not in row(0.049) and row(0.049)["within_rounding"] == "False"
    assert row(0.0495)["status"] == "wrong" and "5 times" in row(0.0495)["reason"]
    assert row(float("nan"))["status"] == "wrong"
    assert "status" not in row(1.0, NO_BIAS) and "status" not in row(1.0, approximate=True)
    same = truth.Truth({"": wide}, {"": wide}, "here")  # no rounding to be judged by
    assert "status" not in truth.errors_of({"": wide + 1}, same, torch.float32, "flex")


def test_wrong_rows_take_no_part_in_ratios() -> None:
    def row(variant: str, ms: str, status: str = "measured") -> dict[str, str]:
        named = {"model": "m", "variant": variant, "median_ms": ms, "status": status}
        return {**dict.fromkeys(writing.COLUMNS, ""), **named, "reason": "off"}

    rows = [row("none", "1"), row("flex", "0.5", "wrong"), row("exact", "2")]
    lines = writing.summary(rows, ("none", "flex")).splitlines()[2:]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    assert [c[2] for c in cells] == ["1.000", "(0.500: off)", "2.000"]
    assert [c[4] for c in cells] == ["1.00", "", "0.50"]
    assert [c[5] for c in cells] == ["", "", ""]


def test_an_original_that_does_not_fit_is_replaced_by_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = plain.cases(True)["plain-20"]
    whole = truth.find_truth(case, OPTIONS)

    def attention(way: str, *args: Any) -> nn.Module:
        if way == "original":
            raise torch.OutOfMemoryError("all of it")
        return static_bias.attention(way, *args)

    monkeypatch.setattr(plain, "attention", attention)
    rows = truth.find_truth(case, OPTIONS)
    assert rows.how == "original's formula by rows"
    assert whole.plain is not None and rows.plain is not None
    assert whole.wide is not None
    for name, wide in whole.wide.items():  # in bfloat16 it rounds as much as the original does
        assert_parity(rows.plain[name], whole.plain[name], wide.double())


def run(tmp_path: Path, *arguments: str) -> list[dict[str, str]]:
    parser = argparse.ArgumentParser()
    bench_models.add_options(parser, "x.csv")
    given = ["--tiny", "--device", "cpu", "--repeats", "1", "--output", str(tmp_path / "x.csv")]
    options = parser.parse_args([*given, *arguments])
    table = writing.Table(options.output, resume=options.resume)
    bench_models.run([plain.cases(True)["plain-20"]], options, table)
    with options.output.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_goes_on_where_it_was(tmp_path: Path) -> None:
    first = run(tmp_path, "--variants", "none", "exact")
    assert [row["variant"] for row in first] == ["none", "exact"]
    both = run(tmp_path, "--variants", "original", "none", "--resume")
    assert both[:2] == first and [row["variant"] for row in both[2:]] == ["original"]
    assert "| plain Transformer 20 | exact |" in writing.summary(both, ("none",))


def test_want_of_memory_beside_others_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a truth: rows of a model without one would stay without errors."""
    problem = torch.OutOfMemoryError("CUDA out of memory")
    whole = plain.cases(True)["plain-20"]
    tight = dataclasses.replace(whole, name="tight")
    where = {"lacking": ()}

    def attention(way: str, *args: Any) -> nn.Module:
        if way in where["lacking"]:
            raise problem
        return static_bias.attention(way, *args)

    def rows(*lacking: str, resume: bool = True) -> dict[tuple[str, str], str]:
        where["lacking"] = lacking
        table = writing.Table(tmp_path / "rows.csv", resume=resume)
        running.run_apart(lambda _: [tight], options, table)
        return {(row["model"], row["variant"]): row["status"] for row in table.rows}

    monkeypatch.setattr(plain, "attention", attention)
    monkeypatch.setattr(running, "in_turns", in_turns_here)
    options = argparse.Namespace(device="cpu", dtype="bfloat16", repeats=1, limit_s=0.0, stop_s=0.0,
                                 tiny=True, variants=["original", "sdpa"], together=2)  # fmt: skip
    monkeypatch.delenv(BESIDE, raising=False)
    assert rows("sdpa") == {("tight", "original"): "measured", ("tight", "sdpa"): "failed"}
    (tmp_path / "rows.csv").unlink()
    monkeypatch.setenv(BESIDE, "/nowhere")
    assert rows("original", BY_ROWS) == {}
    assert rows("sdpa") == {("tight", "original"): "measured"}
    assert rows() == {("tight", "original"): "measured", ("tight", "sdpa"): "measured"}
    # the formula by rows is a truth, too
    assert truth.find_truth(tight, OPTIONS).how == "original in float32"
    where["lacking"] = ("original",)
    assert truth.find_truth(tight, OPTIONS).how == "original's formula by rows"


def test_cases_in_one_process_go_on_where_memory_lacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = dataclasses.replace(slow(0, torch.OutOfMemoryError("CUDA out of memory")), name="lacks")
    options = argparse.Namespace(device="cpu", dtype="float32", repeats=1, limit_s=0.0, stop_s=0.0,
                                 variants=None)  # fmt: skip
    monkeypatch.setenv(BESIDE, "/nowhere")
    table = writing.Table(tmp_path / "rows.csv")
    bench_models.run([lacks, slow(0)], options, table)
    assert [row["model"] for row in table.rows] == ["slow"]
    monkeypatch.delenv(BESIDE)
    bench_models.run([lacks], options, table)
    assert [row["reason"] for row in table.rows] == ["", "out of memory"]
