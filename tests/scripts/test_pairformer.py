"""The script of the Pairformer block: its ways agree, and a run of the smallest size."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "paper"
sys.path.insert(0, str(SCRIPTS))

import pairformer as script  # noqa: E402
import pairformer_block as block  # noqa: E402
import pairformer_core as core  # noqa: E402
import pairformer_parts as parts  # noqa: E402
import pairformer_table as table  # noqa: E402
import pairformer_ways as ways  # noqa: E402
from turns import BESIDE  # noqa: E402

from flashbias_convert.decompose import serving  # noqa: E402
from flashbias_convert.decompose.neural_samples import Sample, mean_loss, squared_size  # noqa: E402
from flashbias_convert.decompose.randomised import decompose_quickly  # noqa: E402

N = 18


def test_ways_agree() -> None:
    """In float64, factors of full rank included; N is no multiple of what masks are padded to."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(N, 2, N, 4, generator=draw).double() for _ in range(4))
    bias = torch.randn(2, N, N, generator=draw).double()
    expected = (q @ k.mT / 2 + bias).softmax(-1) @ v * gate.sigmoid()
    exact = ways.exact_ways(compiles=False)
    exact.pop("cuEquivariance", None)
    call = ways.Call(q, k, v, lambda: bias, gate)
    for way in (*exact.values(), ways.factors(N), ways.kept(bias, N)):
        # factors are fp32
        torch.testing.assert_close(way(call), expected, atol=1e-5, rtol=1e-5)


def test_kept_factors_ask_for_no_bias() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(N, 2, N, 4, generator=draw) for _ in range(3))
    call = ways.Call(q, k, v, lambda: pytest.fail("a bias was made"))
    assert ways.kept(torch.randn(2, N, N, generator=draw), 3)(call).isfinite().all()


def test_the_ending_node_is_the_starting_one_of_the_transpose() -> None:
    starting = block.TriangleAttention(8, 2, 4, starting=True)
    ending = block.TriangleAttention(8, 2, 4, starting=False)
    ending.load_state_dict(starting.state_dict())
    z = torch.randn(N, N, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = starting(z.transpose(0, 1), ways.sdpa).transpose(0, 1)
        torch.testing.assert_close(ending(z, ways.sdpa), expected)
        torch.testing.assert_close(ending.bias(z), starting.bias(z.transpose(0, 1)))


def test_the_core_is_its_formula_with_padding() -> None:
    made = core.Core(2 * N, 2, 4, "cpu", torch.float32, compiles=False)
    assert not made.mask.all()
    for gated in (True, False):
        calls = made.calls(gated)
        for name in ("ours", *(["ours, gate apart"] if gated else [])):
            found = made.errors(calls[name][0], gated)
            assert found["error"] <= 2 * found["library_error"]
        unmasked = made.errors(calls["ours, no mask"][0], gated)["error"]
        assert unmasked > 0.01  # the mask counts


def test_networks_in_closed_form_learn_what_tokens_say() -> None:
    """A bias of rank 2 in the features, on a structure that was not fitted."""
    draw = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(4):
        x = torch.randn(300, 3, generator=draw)
        samples.append(Sample(x, x, (x[:, :2] @ x[:, 1:].mT)[None]))
    *known, unseen = samples
    size = squared_size(unseen, "centred")
    lost = mean_loss(ways.fitted(known[:2], known[2], 8), [unseen], "centred", size)
    assert lost < 0.05  # 1 is what no bias at all loses


def test_gradients_of_ways_agree() -> None:
    made = parts.Block(12, script.TINY, "cpu", torch.float32, compiles=False)
    for name in ("starting", "attention", "block"):
        for way in ("SDPA", "ours, dense"):
            found = made.gradient_errors(name, made.runners(name)[way]())
            assert 0 < found["gradient_error"] <= 2 * found["library_gradient_error"]
            assert 0 < found["bias_gradient_error"] < 1e-5


def test_boltz_computes_the_same() -> None:
    pytest.importorskip("boltz.model.layers.pairformer")
    made = parts.Block(12, script.TINY, "cpu", torch.float32, compiles=False)
    for name in (*block.PARTS, "block"):
        found = made.errors(name, made.boltz(name, False))
        assert found["error"] <= 2 * found["library_error"]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, str]]:
    options = ["--tiny", "--no-compile", "--device", "cpu", "--dtype", "float32", *more]
    monkeypatch.setattr(sys, "argv", ["script", *options, "--output", str(folder)])
    script.main()
    with (folder / "pairformer.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    rows = run(tmp_path, monkeypatch, "--parts", "diffusion")
    assert {row["component"] for row in rows} == {"diffusion step"}
    assert "200 steps: factors are" in capsys.readouterr().out
    for row in rows:
        total = float(row["once_ms"]) + 200 * float(row["ms"])
        assert float(row["steps_200_ms"]) == pytest.approx(total, abs=0.02)
    (chosen,) = (row for row in rows if row["way"] == parts.CHOSEN)
    assert chosen["chosen"].startswith("2 heads dense: the bias itself is exact")
    assert float(chosen["error"]) <= 2 * float(chosen["library_error"])
    kept = [row["chosen"] for row in rows if row["way"] == "ours, factors kept"]
    assert len(kept) == 2 and all(verdict.startswith("no: ") for verdict in kept)
    before, rows = rows, run(tmp_path, monkeypatch, "--resume")
    assert rows[: len(before)] == before  # not measured again
    assert len(rows) == len({tuple(row[name] for name in table.KEY) for row in rows})
    only_cards = ("cuEquivariance", "its kernels", "SDPA efficient", "SDPA cudnn")
    assert {r["status"] for r in rows if not any(w in r["way"] for w in only_cards)} == {"ok"}
    assert (tmp_path / "pairformer.png").stat().st_size > 0
    modes = {"inference", "training"}
    assert {row["mode"] for row in rows} == modes
    exact = [row for row in rows if row["way"] in ("library", "SDPA", "ours, dense", "ours")]
    for row in exact:
        assert float(row["error"]) <= 2 * float(row["library_error"])
        if row["mode"] == "training":
            assert float(row["gradient_error"]) <= 2 * float(row["library_gradient_error"])
    for component in parts.NAMES.values():
        assert {row["mode"] for row in exact if row["component"] == component} == modes
    for component in ("block", *(parts.NAMES[site] for site in block.SITES)):
        own = [r for r in rows if r["component"] == component and r["mode"] == "inference"]
        kept = [r for r in own if r["way"] == "ours, factors kept"]
        assert kept and all(float(r["once_ms"]) > 0 and float(r["error"]) > 1e-5 for r in kept)
        assert all(float(r["error"]) > 1e-5 for r in own if r["way"] == "ours, networks")
        assert {"ours, networks", "ours, no bias"} <= {row["way"] for row in own}


def test_jobs_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in their processes, but one after the other: each gets ready, then measures."""
    pytest.importorskip("matplotlib")

    def in_turns(job: Any, calls: Any) -> list[Any]:
        return [job(*arguments, lambda: None) for arguments in calls][:0]

    monkeypatch.setattr(script, "in_turns", in_turns)
    some = ["--together", "2", "--parts", "core", "--ways", "ours"]
    rows = run(tmp_path, monkeypatch, *some)
    assert [(r["n"], r["way"]) for r in rows] == [("12", "ours")] * 2 + [("17", "ours")] * 2
    assert not list(tmp_path.glob("*.running"))


def test_a_row_whose_process_ended_twice_is_a_row(tmp_path: Path) -> None:
    facts = {"way": "a", "component": "c", "n": 1, "mode": "m"}

    def dies() -> table.Trial:
        raise KeyboardInterrupt

    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            make_table(tmp_path, resume=resume).time(dies, **facts)
    (row,) = make_table(tmp_path, resume=True).rows
    assert "ended while it ran" in row["status"] and row["way"] == "a"
    assert not list(tmp_path.glob("*.running"))


def test_a_row_that_a_stopped_run_was_in_is_tried_again(tmp_path: Path) -> None:
    facts = {"way": "a", "component": "c", "n": 1, "mode": "m"}

    def stopped() -> table.Trial:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_table(tmp_path).time(stopped, **facts)
    assert not make_table(tmp_path, resume=True).rows  # a run that did not come so far
    made = make_table(tmp_path, resume=True)
    made.time(lambda: table.Trial(lambda: None), **facts)
    assert [row["status"] for row in made.rows] == ["ok"]
    assert not list(tmp_path.glob("*.running"))


def test_a_broken_context_ends_the_process(tmp_path: Path) -> None:
    def breaks() -> table.Trial:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    made = make_table(tmp_path)
    with pytest.raises(table.Broken):
        made.time(breaks, way="a", component="c", n=1, mode="m")
    assert "illegal memory access" in made.rows[0]["status"]


def make_table(path: Path, **options: Any) -> table.Table:
    return table.Table(path / "t.csv", "cpu", torch.float32, repeats=1, **options)


def test_rows_that_fail_or_take_too_long_say_so(tmp_path: Path) -> None:
    made = make_table(tmp_path, limit_s=0.2, ways=["a*"])

    def fails() -> table.Trial:
        raise RuntimeError("no room")

    made.time(fails, way="a1", component="c", n=1, mode="m")
    made.time(lambda: table.Trial(lambda: time.sleep(1)), way="a2", component="c", n=1, mode="m")
    made.time(lambda: table.Trial(lambda: None), way="b", component="c", n=1, mode="m")
    assert [row["way"] for row in made.rows] == ["a1", "a2"]
    assert "no room" in made.rows[0]["status"] and "over the limit" in made.rows[1]["status"]
    assert not made.good(component="c")


def test_a_peer_that_is_wrong_says_so(tmp_path: Path) -> None:
    made = make_table(tmp_path)
    for error, exact in ((1.0, True), (float("nan"), True), (1.0, False), (0.02, True)):
        found = {"error": error, "library_error": 0.01}
        trial = table.Trial(lambda: None, lambda e=found: e, exact=exact)
        made.time(lambda t=trial: t, way=str(len(made.rows)), component="c", n=1, mode="m")
    assert [row["status"] for row in made.rows] == ["wrong", "wrong", "ok", "ok"]
    assert len(made.good(component="c")) == 2


def test_nothing_is_begun_after_the_time_is_up(tmp_path: Path) -> None:
    made = make_table(tmp_path, ends=0.0)
    with pytest.raises(table.Stopped, match="before c, a at N = 1"):
        made.time(lambda: table.Trial(lambda: None), way="a", component="c", n=1, mode="m")
    assert made.rows == []


def test_break_even() -> None:
    rows = [{"way": "dense", "rank": "", "ms": "2", "steps_200_ms": "401"}]
    for rank, ms, total in ((16, 1, 250), (32, 1.9, 460), (64, 1.8, 390), (128, 9, 2000)):
        rows.append({"way": "f", "rank": f"{rank}", "ms": f"{ms}", "steps_200_ms": f"{total}"})
    one, many = table.break_even(rows, "dense", "f")
    assert one.endswith("up to rank 64 (not at 128)")
    assert many.endswith("up to rank 64 (not at 32, 128)")
    assert "at no rank" in table.break_even(rows[:1] + rows[-1:], "dense", "f")[0]


def test_break_even_without_the_time_of_python() -> None:
    """Steps that wait for Python hide what an SVD costs: 200 of 0.5 ms are saved by it, or 10."""
    rows = [{"way": "dense", "rank": "", "ms": "1", "replay_ms": "0.15", "once_ms": "1",
             "steps_200_ms": "201"}]  # fmt: skip
    for rank, once in ((8, 5), (16, 30)):
        rows.append({"way": "f", "rank": f"{rank}", "ms": "0.5", "replay_ms": "0.1",
                     "once_ms": f"{once}", "steps_200_ms": f"{once + 100}"})  # fmt: skip
    steps, alone = table.break_even(rows, "dense", "f")[2:]
    assert steps.startswith("200 steps: ") and steps.endswith("up to rank 16")
    assert alone.startswith("200 steps, the card alone: ")
    assert alone.endswith("up to rank 8 (not at 16)")  # 31 ms: 25, and 50


def test_steps_from_which_factors_pay() -> None:
    """Beside a bias that has to be made once, too."""
    rows = [{"way": "dense", "rank": "", "ms": "2", "replay_ms": "0.5", "once_ms": "1"}]
    for rank, ms, replay, once in ((16, 1.5, 0.25, 11), (32, 2, 0.375, 21), (64, 1, "", 0.5)):
        rows.append({"way": "f", "rank": f"{rank}", "ms": f"{ms}", "replay_ms": f"{replay}",
                     "once_ms": f"{once}"})  # fmt: skip
    calls, alone = table.pays_from(rows, "dense", "f")
    assert calls == "steps from which factors pay, by rank: 16: 21, 32: never, 64: 1"
    assert alone.endswith("the card alone: 16: 41, 32: 161")


@pytest.mark.parametrize("spent", [1.0, 1e-9])
def test_a_verdict_follows_the_rule(spent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "factors_ms", lambda *_: spent)
    site = serving.Site(1, 2, 256, 256, 32, serving.Serving(199, 5))
    bias = torch.ones(2, 256, 1) * torch.arange(256.0)
    made = decompose_quickly(bias, head_dim=32, serving=site.serving)
    if spent == 1.0:
        assert parts.verdict(site, 16).startswith("no: factors of rank 16 would save")
        assert parts.in_words(made).startswith("2 heads dense: the bias itself is exact")
    else:
        assert parts.verdict(site, 16).startswith("yes: they would save")
        assert parts.in_words(made).startswith("2 heads low_rank: rank ")


def test_rows_from_before_there_was_a_choice_stay(tmp_path: Path) -> None:
    """A file without the column is gone on with."""
    facts = {"way": "a", "component": "c", "n": 1, "mode": "m"}
    old = make_table(tmp_path)
    old.time(lambda: table.Trial(lambda: None), **facts)
    columns = [name for name in table.COLUMNS if name != "chosen"]
    with old.path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(old.rows)
    made = make_table(tmp_path, resume=True)
    made.time(lambda: pytest.fail("it was measured"), **facts)
    made.time(lambda: table.Trial(lambda: None, chosen="b, and why"), **facts | {"way": "b"})
    with made.path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["way"], row["chosen"]) for row in rows] == [("a", ""), ("b", "b, and why")]
    assert {**old.rows[0], "chosen": ""} == rows[0] and len(made.good(component="c")) == 2


def test_want_of_memory_beside_others_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a row without errors, where only the truth lacked it."""

    def lacks(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def measure(made: table.Table) -> list[str]:
        made.time(lacks, way="call", component="c", n=1, mode="m")
        made.time(
            lambda: table.Trial(lambda: None, lacks), way="truth", component="c", n=1, mode="m"
        )
        made.time(lambda: table.Trial(lambda: None), way="fits", component="c", n=1, mode="m")
        return [row["way"] for row in made.rows]

    monkeypatch.setenv(BESIDE, "/nowhere")
    assert measure(make_table(tmp_path)) == ["fits"]
    assert not list(tmp_path.glob("*.running"))
    monkeypatch.delenv(BESIDE)
    made = make_table(tmp_path, resume=True)
    assert measure(made) == ["fits", "call", "truth"]
    assert "OutOfMemoryError" in made.rows[1]["status"]
    assert made.rows[2]["status"] == table.NO_ERROR
