"""What the scripts for whole models share: hand-written attention, rows, tables."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import LowRank, inspect_model
from flashbias_convert.patched_attention import PatchedAttention
from tests.support import assert_parity

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "paper")]

import bench_models  # noqa: E402
from turns import BESIDE  # noqa: E402
from whole_models import (  # noqa: E402
    documents,
    families,
    hand,
    language,
    measuring,
    parts,
    plain,
    repositories,
    running,
    small_tables,
    static_bias,
    truth,
    vision,
    weather,
    writing,
)  # fmt: skip
from whole_models.case import (  # noqa: E402
    BY_ROWS,
    FLEX,
    FUSED,
    NO_BIAS,
    NONE_CUDNN,
    SDPA,
    SDPA_CUDNN,
    WITHOUT_BIAS,
    Case,
    converted,
)
from whole_models.hand import HandAttention  # noqa: E402
from whole_models.parts import Sizes  # noqa: E402

from .turns_here import in_turns_here  # noqa: E402

CPU = torch.device("cpu")
OPTIONS = truth.Options(CPU, torch.bfloat16, repeats=1)
pytestmark = pytest.mark.filterwarnings("ignore")


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    added = bias.repeat(len(q) // len(bias), 1, 1, 1)
    return (q @ k.transpose(-1, -2) * scale + added).softmax(-1) @ v


@pytest.mark.parametrize("way", [SDPA, SDPA_CUDNN, FLEX, BY_ROWS])
@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("n", [16, 9])
def test_windows_by_hand_take_their_own_bias(way: str, windows: int, n: int) -> None:
    bias = torch.randn(windows, n, n, 2).movedim(-1, 1)
    q, k, v = torch.randn(3, 6, 2, n, 16).unbind(0)
    out = HandAttention(way, bias, 0.3)(q, k, v)
    exact = formula(*(x.double() for x in (q, k, v, bias)), 0.3)
    assert_parity(out, formula(q, k, v, bias, 0.3), exact)


@pytest.mark.parametrize("way", [SDPA, SDPA_CUDNN, FLEX, BY_ROWS, NO_BIAS, NONE_CUDNN])
def test_causal_attention_by_hand(way: str) -> None:
    bias = static_bias.StaticBias.alibi(2, 16, CPU)
    q, k, v = torch.randn(3, 1, 2, 16, 16).unbind(0)
    out = static_bias.attention(way, bias, torch.float32, 16)(q, k, v)
    hidden = bias.dense(torch.float32, hide=True)
    if way in WITHOUT_BIAS:
        hidden = torch.zeros_like(hidden).masked_fill(hidden.isinf(), float("-inf"))
    exact = formula(*(x.double() for x in (q, k, v, hidden)), 0.25)
    assert_parity(out, formula(q, k, v, hidden, 0.25), exact)


@pytest.mark.parametrize(
    "case",
    [
        vision.cases(True)["swinv2-b"],
        weather.cases(True)["pangu"],
        plain.cases(True)["plain-33"],
        language.cases(True)["gpt2-prefill-2k"],
        language.cases(True)["gpt2-decode-2k"],
        language.cases(True)["gpt2-decode-2k-growing"],
    ],
    ids=lambda case: case.name,
)
def test_what_is_written_by_hand_computes_what_the_original_does(case: Case) -> None:
    def output(way: str, dtype: torch.dtype) -> Tensor:
        ready = case.prepare(way, CPU, dtype)
        with torch.no_grad():
            found = measuring.outputs_of(ready.model(*ready.args, **ready.kwargs), case.batch)
        return next(iter(found.values()))

    truth, original = output("original", torch.float64), output("original", torch.float32)
    for way in (SDPA, SDPA_CUDNN, "exact"):
        assert_parity(output(way, torch.float32), original, truth)
    other = (output(NO_BIAS, torch.float32) - original).abs().max()
    assert other > 100 * (original.double() - truth).abs().max()


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

    # allowed: twice the rounding and a unit in the last place of 1, 2**-7; wrong: twice that
    assert "status" not in row(0.02) and row(0.02)["within_rounding"] == "True"
    assert "status" not in row(0.055) and row(0.055)["within_rounding"] == "False"
    assert row(0.056)["status"] == "wrong" and "6 times" in row(0.056)["reason"]
    assert row(float("nan"))["status"] == "wrong"
    assert "status" not in row(1.0, NO_BIAS) and "status" not in row(1.0, approximate=True)
    same = truth.Truth({"": wide}, {"": wide}, "here")  # no rounding to be judged by
    assert "status" not in truth.errors_of({"": wide + 1}, same, torch.float32, "flex")


def test_only_truncated_biases_make_a_conversion_approximate() -> None:
    case = vision.cases(True)["swinv2-b"]
    for way, expected in (("original", False), ("sdpa", False), ("exact", False)):
        assert case.prepare(way, CPU, torch.float32).approximate is expected
    cut = case.build(CPU).eval()
    converted(cut, "ours", method="svd", energy=0.9, force=True)
    assert cut.flashbias_approximate is True


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


def test_factors_are_rounded_once_where_the_matrix_is() -> None:
    bias = static_bias.StaticBias.factors(2, 16, 8, CPU)
    splits = [bias.terms(d).terms[0].split for d in (torch.bfloat16, torch.float16, torch.float32)]
    assert splits == [0, 0, None]


@pytest.mark.parametrize("on_card", [True, False])
def test_only_cudnn_is_asked_for_on_a_card(on_card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    @contextlib.contextmanager
    def kernel(backend: Any) -> Iterator[None]:
        asked.append(backend)
        yield

    monkeypatch.setattr(hand, "sdpa_kernel", kernel)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: on_card))
    q = torch.randn(1, 2, 8, 8)
    for way in (SDPA, SDPA_CUDNN, NO_BIAS, NONE_CUDNN):
        HandAttention(way, torch.zeros(1, 2, 8, 8), 1.0)(q, q, q)
    assert asked == [hand.SDPBackend.CUDNN_ATTENTION] * (2 if on_card else 0)


def test_bytes_of_biases() -> None:
    case = plain.cases(True)["plain-20"]

    def of(way: str) -> int:
        return measuring.bias_bytes(case.prepare(way, CPU, torch.bfloat16).model)

    assert of("original") == 2 * 2 * 20 * 20
    assert of("sdpa") == 2 * 2 * 20 * 32  # rows are padded
    assert of("none") == 0 < of("exact")
    case = language.cases(True)["gpt2-prefill-2k"]
    assert of("sdpa") == 2 * 4 * 20 * 32


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


def test_every_model_has_a_name_and_ours() -> None:
    for tiny in (False, True):  # nothing is built
        for name, case in bench_models.all_cases(tiny).items():
            assert name == name.lower() or name.startswith("family-")
            assert "original" in case.variants() and "exact" in case.variants()


def test_pangu_at_the_rank_of_the_paper() -> None:
    """Factors of 56 columns at the fine scale, the dense bias elsewhere; near the original."""
    case = weather.cases(True)["pangu"]
    ready = case.prepare("svd-56", CPU, torch.float32)
    assert ready.approximate
    sites = [m for m in ready.model.modules() if isinstance(m, weather.EarthAttention3D)]
    hand_made = [m for m in ready.model.modules() if isinstance(m, weather.HandEarthAttention)]
    assert len(sites) == len(hand_made) == 4
    for site in sites:
        score_bias: Any = site.score_bias
        (term,) = [t for t in score_bias.bias.terms if isinstance(t, LowRank)]
        assert term.phi_k.shape[-1] == 56

    def output(way: str) -> Tensor:
        one = case.prepare(way, CPU, torch.float32)
        with torch.no_grad():
            return next(iter(measuring.outputs_of(one.model(*one.args), 1).values()))

    original, cut, none = (output(way) for way in ("original", "svd-56", NO_BIAS))
    assert 0 < (cut - original).norm() < (none - original).norm()


def test_flex_attention_without_a_bias_is_no_bias() -> None:
    case = language.cases(True)["gpt2-prefill-2k"]

    def output(way: str, dtype: torch.dtype) -> Tensor:
        one = case.prepare(way, CPU, dtype)
        with torch.no_grad():
            found = measuring.outputs_of(one.model(*one.args, **one.kwargs), 1)
        return next(iter(found.values()))

    exact = output(NO_BIAS, torch.float64)
    assert_parity(output("none-flex", torch.float32), output(NO_BIAS, torch.float32), exact)


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


def test_timms_switch_is_measured_where_it_changes_something() -> None:
    """Of the models of timm: which are built otherwise with it."""
    from timm.layers import set_fused_attn, use_fused_attn

    def fused(case: Any) -> list[bool]:
        with torch.no_grad():
            model = case.build(torch.device("cpu"))
        return [m.fused_attn for m in model.modules() if hasattr(m, "fused_attn")]

    assert use_fused_attn() and not use_fused_attn(experimental=True)
    for case in families.cases(True).values():
        if not case.name.startswith("timm_"):
            continue
        usual = fused(case)
        set_fused_attn(experimental=True)
        try:
            changed = fused(case) != usual
        finally:
            set_fused_attn()
        assert changed == (FUSED in case.ways), case.name


def test_a_switch_that_changes_nothing_is_no_variant() -> None:
    with pytest.raises(RuntimeError, match="not fused already"):
        parts.with_fused_attention(torch.nn.Linear(2, 2))


def test_small_tables_are_computed_by_the_kernel_though_no_plan_says_so() -> None:
    case = small_tables.cases(True)["efficientformer"]
    with torch.no_grad():
        ready = {way: case.prepare(way, CPU, torch.float32) for way in case.ways}
        plain, *others = (p.model(*p.args, **p.kwargs) for p in ready.values())
        for other in others:
            torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-5)
        model = ready["exact"].model
        sites = [m for m in model.modules() if isinstance(m, small_tables.FusedAttention)]
        assert sites and not inspect_model(case.build(CPU)).patched
        for site in sites:  # and their bias matters
            for name, tensor in site.score_bias.named_buffers():
                if tensor.is_floating_point() and "bound" not in name:
                    tensor.zero_()
        assert not torch.allclose(model(*ready["exact"].args), plain, rtol=1e-2)


@pytest.mark.parametrize("name", ["timm_levit, 384", "transformers_levit, as 384"])
def test_levit_of_the_families_feels_its_bias(name: str) -> None:
    """Fresh weights would hide it: the last norm of an attention begins at zero."""
    case = families.cases(True)[f"family-{name}"]

    def output(ready: Any) -> Tensor:
        out = ready.model(*ready.args, **ready.kwargs)
        return out if isinstance(out, Tensor) else out[0]

    with torch.no_grad():
        plain, exact = (case.prepare(way, CPU, torch.float32) for way in ("original", "exact"))
        right = output(plain)
        torch.testing.assert_close(output(exact), right, rtol=1e-4, atol=1e-5)
        bare = case.prepare("original", CPU, torch.float32)
        for parameter_name, parameter in bare.model.named_parameters():
            if "attention_biases" in parameter_name:
                parameter.zero_()
        assert not torch.allclose(output(bare), right, rtol=1e-2)


WRITTEN = [*documents.parts(Sizes(tiny=True)), *repositories.parts(Sizes(tiny=True))]


@pytest.mark.parametrize("name", WRITTEN)
def test_models_that_are_written_here_are_converted_exactly(name: str) -> None:
    """Their recipes know them for what they are, all of their sites."""
    case = families.cases(True)[f"family-{name}"]
    with torch.no_grad():
        ready = [case.prepare(way, CPU, torch.float32) for way in ("original", "exact")]
        plain, exact = (p.model(*p.args, **p.kwargs) for p in ready)
    torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
    before = len([m for m in ready[0].model.modules() if type(m).__name__ in ATTENTIONS])
    after = len([m for m in ready[1].model.modules() if isinstance(m, PatchedAttention)])
    assert after == before > 0


ATTENTIONS = {
    "LayoutLMv2SelfAttention", "PPDocLayoutV2ReadingOrderSelfAttention", "WindowAttention",
    "Attention", "ALiBiMultiHeadAttention", "JinaBertSelfAttention", "BertUnpadSelfAttention",
    "OCAB",
}  # fmt: skip
