"""Whole models: every row is there, what is wrong is called so, and nothing is changed."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch
from torch import nn

from flashbias_convert import BenchmarkReport, benchmark_model, patch_model
from flashbias_convert.benchmark import stand_ins
from flashbias_convert.benchmark.calls import attending
from flashbias_convert.benchmark.flat import COLUMNS, flat_rows
from flashbias_convert.benchmark.models import (
    CONVERTED,
    CONVERTED_COMPILED,
    ORIGINAL,
    ORIGINAL_AGAIN,
    ORIGINAL_COMPILED,
    unsteady,
)
from flashbias_convert.benchmark.peers import FLEX, NO_BIAS, OURS, SDPA, SDPA_COMPILED
from flashbias_convert.benchmark.result import Row
from flashbias_convert.benchmark.run import CPU_NOTE
from flashbias_convert.benchmark.synthetic import synthetic_call
from flashbias_convert.benchmark.timing import Times
from flashbias_convert.errors import FlashBiasError, StaleTermsError, UsageError
from flashbias_convert.models.alibi_gpt2 import AlibiGPT2Config, AlibiGPT2LMHeadModel
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.plan import Plan
from tests.checkpoint.models import images, tiny_model
from tests.support import assert_parity
from tests.toy import TOY, ToyModel, make_input, make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
QUICK: dict[str, Any] = {"repeats": 1, "compile": False, "max_tokens": 0}


def pair(**options: Any) -> tuple[ToyModel, ToyModel, Plan]:
    converted = make_model(2)
    plan = patch_model(converted, recipes=[TOY], force_all=True, **options)
    return make_model(2), converted, plan


def by_name(report: BenchmarkReport, case: int = 0) -> dict[str, Any]:
    return {row.name: row for row in report.cases[case].rows}


# -- what is measured ----------------------------------------------------------------------


def test_windows_with_masks_are_measured_model_by_model_and_site_by_site() -> None:
    converted = tiny_model()
    plan = patch_model(converted, method="svd")
    options = {**QUICK, "max_tokens": 32}
    report = benchmark_model(tiny_model(), converted, images(), plan=plan, **options)
    (case,) = report.cases
    assert case.inputs == "batch 2: input (2, 3, 32, 32)" and case.size == 2
    rows = by_name(report)
    assert list(rows) == [
        ORIGINAL, ORIGINAL_COMPILED, SDPA, FLEX, CONVERTED, CONVERTED_COMPILED, NO_BIAS,
        ORIGINAL_AGAIN,
    ]  # fmt: skip
    verdicts = {name: row.verdict for name, row in rows.items() if row.status == "measured"}
    assert verdicts == {
        ORIGINAL: "within rounding",
        SDPA: "approximate",
        CONVERTED: "approximate",
        NO_BIAS: "another function, not compared",
        ORIGINAL_AGAIN: "within rounding",
    }
    # a truncated bias moves the outputs, and the peer with the same terms moves them alike
    assert rows[CONVERTED].difference_max > 100 * rows[ORIGINAL].difference_max
    assert rows[SDPA].difference_max == pytest.approx(rows[CONVERTED].difference_max, rel=1e-2)
    assert all("switched off" in r.reason for r in rows.values() if r.status == "not measured")
    assert rows[ORIGINAL].ratios == {ORIGINAL: 1.0} and rows[CONVERTED].ratios[ORIGINAL] > 0
    assert rows[ORIGINAL].peak_mib is None
    assert [(g.sites[0], g.batch, g.terms) for g in case.sites] == [
        ("layers.0.blocks.0.attn", (8,), ("low_rank",)),
        ("layers.0.blocks.1.attn", (2, 4), ("low_rank", "regions")),
        ("layers.1.blocks.0.attn", (2,), ("low_rank",)),
    ]
    for group in case.sites:
        names = [row.name for row in group.rows]
        assert names == [OURS, SDPA, SDPA_COMPILED, FLEX, NO_BIAS]
        assert [r.verdict for r in group.rows[:2]] == ["within rounding"] * 2
    assert [one.fixed_n for one in report.break_even] == [64, 64, 64]
    points = report.break_even[0].points
    assert [(p.n, p.batch) for p in points] == [(16, 32), (32, 16)]
    assert CPU_NOTE in report.notes and "torch" in report.versions


def test_a_report_is_plain_json_and_a_table() -> None:
    original, converted, plan = pair(method="exact")
    options = {**QUICK, "max_tokens": 16}
    report = benchmark_model(original, converted, make_input(), plan=plan, **options)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["device"] == "cpu" and data["threads"] and data["dtype"] == "float32"
    assert data["cases"][0]["rows"][0]["name"] == ORIGINAL
    assert data["break_even"][0]["points"][0]["n"] == 16
    rows = flat_rows(report)
    assert [row["part"] for row in rows] == ["model"] * 8 + ["site"] * 4 + ["break-even"] * 4
    assert all(set(row) == set(COLUMNS) for row in rows)
    assert rows[0]["median_ms"] == report.cases[0].rows[0].median_ms
    (group,) = report.cases[0].sites
    assert group.sites == ("blocks.0.attn", "blocks.1.attn")


def test_every_length_of_a_language_model_is_a_case() -> None:
    torch.manual_seed(0)
    config = AlibiGPT2Config(
        vocab_size=61, n_embd=24, n_layer=2, n_head=6, n_positions=32, bos_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    model = AlibiGPT2LMHeadModel(config).eval()
    converted = copy.deepcopy(model)
    plan = patch_model(converted, force_all=True)
    batches = [torch.randint(61, (2, n)) for n in (8, 32)]
    options = {**QUICK, "max_tokens": 16}
    report = benchmark_model(model, converted, batches, plan=plan, **options)
    assert [case.sites[0].n for case in report.cases] == [8, 32]
    assert all(case.sites[0].causal for case in report.cases)
    for number in range(2):
        rows = by_name(report, number)
        assert rows[CONVERTED].verdict == rows[SDPA].verdict == "within rounding"
    (one,) = report.break_even  # both lengths are of one kind
    assert one.fixed_n is None and one.terms == ("alibi",) and len(one.sites) == 2
    # no crossing is invented: what it says is what the points say
    times = {row.name: row.median_ms for row in one.points[0].rows}
    assert one.n == (16 if times[OURS] < times[SDPA] else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_judged_by_its_own_rounding(dtype: torch.dtype) -> None:
    original, converted, plan = pair(method="exact")
    report = benchmark_model(original, converted, make_input(), plan=plan, dtype=dtype, **QUICK)
    rows = by_name(report)
    assert {rows[n].verdict for n in (ORIGINAL, CONVERTED, SDPA)} == {"within rounding"}
    assert {p.dtype for m in (original, converted) for p in m.parameters()} == {torch.float32}


def test_compiled_rows_run_what_torch_compile_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    # traced, but not handed to the C++ compiler, which would take a minute
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    original, converted, plan = pair(method="exact")
    options = {**QUICK, "compile": True}
    report = benchmark_model(original, converted, make_input(), plan=plan, **options)
    rows = by_name(report)
    for name in (ORIGINAL_COMPILED, CONVERTED_COMPILED):
        assert (rows[name].status, rows[name].verdict) == ("measured", "within rounding")
    assert rows[CONVERTED].ratios.keys() == {ORIGINAL, ORIGINAL_COMPILED}
    assert rows[FLEX].status == "not measured" and "per site only" in rows[FLEX].reason
    flex = next(row for row in report.cases[0].sites[0].rows if row.name == FLEX)
    assert (flex.status, flex.verdict) == ("measured", "within rounding")


@torch.no_grad()
def test_flex_attention_stands_in_for_every_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    original, converted, _ = pair(method="exact")
    x = make_input()
    with attending(converted, stand_ins.dense_flex()), stand_ins.complaining():
        outputs = [converted(x), converted(x)]
    truth = copy.deepcopy(original).double()(x.double())
    for out in outputs:
        assert_parity(out, original(x), truth)


# -- what goes wrong -----------------------------------------------------------------------


def test_a_wrong_model_is_wrong_and_not_fast() -> None:
    original, converted, plan = pair(method="exact")
    terms: Any = converted.blocks[0]["attn"].score_bias
    terms.get_buffer("dense.bias")[0, 3] += torch.linspace(0, 1, 36)
    terms._forget()
    report = benchmark_model(original, converted, make_input(), plan=plan, **QUICK)
    rows = by_name(report)
    for name in (CONVERTED, SDPA):
        assert rows[name].status == "wrong" and not rows[name].ratios
        assert rows[name].verdict == "exceeds rounding"
    assert rows[ORIGINAL].status == "measured"


def test_a_peer_that_fails_is_shown_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("backend='inductor' raised:\nNoCompiler: there is none\nand more")

    monkeypatch.setattr(torch, "compile", refuses)
    original, converted, plan = pair(method="exact")
    options = {**QUICK, "compile": True}
    report = benchmark_model(original, converted, make_input(), plan=plan, **options)
    rows = by_name(report)
    for name in (ORIGINAL_COMPILED, CONVERTED_COMPILED):
        assert rows[name].status == "failed"
        assert "NoCompiler: there is none" in rows[name].reason
        assert "\n" not in rows[name].reason
    assert rows[CONVERTED].status == "measured"


def test_where_the_original_has_no_room_the_converted_model_is_still_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, converted, plan = pair(method="exact")

    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(original.blocks[0]["attn"], "project", no_room)
    report = benchmark_model(original, converted, make_input(), plan=plan, **QUICK)
    rows = by_name(report)
    assert (rows[ORIGINAL].status, rows[ORIGINAL].reason) == ("failed", "out of memory")
    assert rows[CONVERTED].status == "measured" and rows[CONVERTED].ratios == {}
    assert rows[CONVERTED].verdict.startswith("not compared: out of memory")


def test_without_room_for_the_converted_model_the_original_is_still_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, converted, plan = pair(method="exact")

    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(converted, "forward", no_room)
    options = {**QUICK, "max_tokens": 16}
    report = benchmark_model(original, converted, make_input(), plan=plan, **options)
    rows = by_name(report)
    assert rows[CONVERTED].reason == "out of memory" and rows[ORIGINAL].status == "measured"
    (case,) = report.cases
    assert case.sites == () and "out of memory" in " ".join(case.notes)
    assert report.break_even == ()


def test_lengths_end_where_there_is_no_room_for_their_terms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashbias_convert.benchmark import break_even

    def limited(call: Any, n: int, batch: int) -> Any:
        if n > 16:
            raise torch.OutOfMemoryError("tried to allocate")
        return synthetic_call(call, n, batch)

    monkeypatch.setattr(break_even, "synthetic_call", limited)
    original, converted, plan = pair(method="exact")
    options = {**QUICK, "max_tokens": 64}
    report = benchmark_model(original, converted, make_input(), plan=plan, **options)
    (one,) = report.break_even
    assert [point.n for point in one.points] == [16]


@pytest.mark.parametrize(
    ("first", "last", "noted"),
    [(10.0, 11.0, False), (10.0, 30.0, True), (30.0, 10.0, True), (10.0, None, False)],
)
def test_a_machine_that_is_busy_for_a_while_is_noted(
    first: float, last: float | None, noted: bool
) -> None:
    rows = [
        Row(name, "failed" if ms is None else "measured", times=Times.of([ms or 1.0]))
        for name, ms in ((ORIGINAL, first), (ORIGINAL_AGAIN, last))
    ]
    assert bool(unsteady(rows)) is noted


def test_inputs_that_do_not_fit_are_an_error() -> None:
    original, converted, _ = pair(method="exact")
    with pytest.raises(FlashBiasError, match="ToyModel does not run: RuntimeError"):
        benchmark_model(original, converted, torch.randn(2, 36, 17), **QUICK)


def test_stale_terms_are_an_error() -> None:
    original, converted, plan = pair(method="exact")
    with torch.no_grad():
        converted.blocks[0]["attn"].table.add_(1)
    with pytest.raises(StaleTermsError):
        benchmark_model(original, converted, make_input(), plan=plan, **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"dtype": torch.float64}, "no wider dtype"),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    original, converted, _ = pair(method="exact")
    with pytest.raises(UsageError, match=message):
        benchmark_model(original, converted, make_input(), **{**QUICK, **options})


def test_models_that_cannot_be_compared() -> None:
    original, converted, _ = pair(method="exact")
    with pytest.raises(UsageError, match="the original is patched"):
        benchmark_model(converted, converted, make_input(), **QUICK)
    with pytest.raises(UsageError, match="no module of the converted model is patched"):
        benchmark_model(original, original, make_input(), **QUICK)
    with pytest.raises(UsageError, match="no inputs"):
        benchmark_model(original, converted, [], **QUICK)


def test_both_models_are_as_before() -> None:
    original, converted, plan = pair(method="exact")
    models: tuple[nn.Module, ...] = (original, converted)
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
    x = make_input()
    with torch.no_grad():
        outputs = [m(x) for m in models]
    benchmark_model(original, converted, x, plan=plan, **QUICK)
    for model, state in zip(models, before, strict=True):
        now = model.state_dict()
        assert now.keys() == state.keys()
        assert all(torch.equal(now[k], v) for k, v in state.items())
        assert not any("forward" in vars(module) for module in model.modules())
    assert any(isinstance(m, ScoreBiasModule) for m in converted.modules())
    with torch.no_grad():
        assert all(torch.equal(m(x), out) for m, out in zip(models, outputs, strict=True))
