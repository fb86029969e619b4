"""Calls that run under the sanitizer, and runs of it that need not be made again."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import sanitize_kernel as script
import sanitizer_calls
from sanitizer_calls import GROUPS, KINDS, Call, run

from flashbias_convert.attention import backends, backward, launch
from flashbias_convert.attention.hopper import plan, rules
from tests.attention.cases import BIASES, Inputs
from tests.attention.conftest import INTERPRETED

CPU = torch.device("cpu")
#: of the largest tile
KEYS = 128
WHERE = {"card": "A", "torch": "2"}


def test_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finding is kept, want of time is not; nor is another card, or other calls."""
    made: list[tuple[str, str]] = []
    problems: dict[str, list[str]] = {}

    def under(tool: str, _: str, group: str, __: float) -> dict[str, Any]:
        if tool == "ends":
            raise KeyboardInterrupt
        made.append((tool, group))
        told = problems.get(tool, [])
        return {"tool": tool, "group": group, "clean": not told,
                "of": len(GROUPS[group]()), "problems": told}  # fmt: skip

    def run(*tools: str, group: str = "terms", where: dict[str, str] = WHERE) -> list[bool]:
        made.clear()
        options = argparse.Namespace(
            tools=tools, only=[group], timeout=1.0, resume=True, output=tmp_path / "found.json"
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
    assert made == [("slow", "terms")]
    assert run("memcheck", group="cosine") == [True] and made == [("memcheck", "cosine")]
    assert run("memcheck", "racecheck") == [True, False] and not made
    assert len(json.loads((tmp_path / "found.json").read_text())["runs"]) == 4
    monkeypatch.setitem(GROUPS, "terms", lambda: [Call("float16", "none", 1, 1)])
    run("memcheck")
    assert made == [("memcheck", "terms")]
    run("memcheck", where={**WHERE, "torch": "3"})
    assert made == [("memcheck", "terms")]
    assert "runs of A, 2 are made again" in capsys.readouterr().out
    old = {**WHERE, "runs": [{"tool": "memcheck", "backward": True, "of": 1, "problems": []}]}
    (tmp_path / "found.json").write_text(json.dumps(old))
    assert run("memcheck") == [True] and made == [("memcheck", "terms")]


def small(group: str, dtypes: tuple[str, ...]) -> list[Call]:
    """Every call of a group once, at sizes for the CPU; Hopper's have the head sizes that count."""
    found = [call for call in GROUPS[group]() if call.dtype in dtypes]
    return list({
        replace(call, n=20, d=call.d if call.hopper else 16, batch=2): None for call in found
    })  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="has run without the interpreter")
@pytest.mark.parametrize("group", GROUPS)
def test_every_call_can_be_made(group: str) -> None:
    calls = GROUPS[group]()
    assert len(calls) == len(set(calls))
    for call in small(group, sanitizer_calls.DTYPES):
        assert not run(call, CPU, "eager")


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("group", GROUPS)
def test_every_call_runs_on_the_kernels(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are trained with atomics, too, where these are served; bf16 is for a card."""
    atomics: list[bool] = []
    serves = backward.is_served

    def is_served(*args: Any) -> bool:
        atomics.append(serves(*args))
        return atomics[-1]

    monkeypatch.setattr(backward, "is_served", is_served)
    calls = small(group, ("float16",))
    for call in calls:
        run(call, CPU)
    trained = [call for call in calls if call.trained]
    assert len(atomics) >= len(trained) and any(atomics) == bool(trained)


def test_what_is_covered() -> None:
    assert {call.bias for call in GROUPS["terms"]()} == set(BIASES)
    trained = GROUPS["trained"]()
    assert {call.bias for call in trained} > set(BIASES) and all(call.trained for call in trained)
    cosine = GROUPS["cosine"]()
    assert all(call.cosine for call in cosine) and {call.trained for call in cosine} == {
        False,
        True,
    }
    hopper = GROUPS["hopper"]()
    for d in (64, 128):
        for dtype in sanitizer_calls.HALF:
            own = {(c.bias, c.causal) for c in hopper if (c.d, c.dtype) == (d, dtype)}
            assert {("none", False), ("low_rank-widest", False), ("late-key", False)} <= own
            assert {(bias, True) for bias in ("none", "low_rank", "alibi", "key_bias")} <= own
    assert all(call.hopper and call.n % KEYS and call.n % rules.ROWS for call in hopper)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As if the CPU were a Hopper whose kernel writes zeros; how many calls it has served."""
    served: list[int] = []

    class Plan:
        def __init__(self, *_: Any) -> None:
            pass

        def run(self, _: torch.device, tensors: Any, __: Any = ()) -> None:
            tuple(tensors)[3].zero_()
            served.append(1)

    Plan.__module__ = plan.__name__
    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(rules, "is_there", lambda device: True)
    monkeypatch.setattr(plan, "HopperPlan", Plan)
    yield served


def test_short_calls_are_served_by_the_kernel_for_hopper(
    hopper: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But only inside such a call; that it has given up is an error."""
    before, plans = (rules.FEWEST_SCORES, dict(rules.SHORTEST)), launch._PLANS
    kinds = ("none", "low_rank", "low_rank-widest", "low_rank-batch", "late-stretch", "late-key")
    for d in (64, 128):
        for bias in kinds:
            assert run(Call("bfloat16", bias, 130, d, hopper=True), CPU)
    assert len(hopper) == 2 * len(kinds)
    assert before == (rules.FEWEST_SCORES, rules.SHORTEST) and launch._PLANS is plans
    serve = plan.HopperPlan.run

    def give_up(*words: Any) -> None:
        serve(*words)
        warnings.warn("that for Hopper fails", stacklevel=1)

    monkeypatch.setattr(plan.HopperPlan, "run", give_up)
    with pytest.raises(RuntimeError, match="that for Hopper fails"):
        run(Call("bfloat16", "none", 130, 64, hopper=True), CPU)


def test_what_is_to_be_computed_again_is_far_above_the_first_tile() -> None:
    """So far that sums of weights by its level are beyond what the kernel takes for good, 2^60."""
    calls = [call for call in GROUPS["hopper"]() if call.bias.startswith("late")]
    for call in calls:
        x = Inputs(CPU, getattr(torch, call.dtype), batch=(2,), n=call.n, d=call.d)
        bias = KINDS[call.bias](x)
        scores = (x.q[..., -1, :].float()[..., None, :] @ x.k.float().mT) * call.d**-0.5
        if bias is not None:
            scores = scores + bias.dense(x.n, x.m)[..., -1:, :]
        level = scores[..., :KEYS].amax(-1).clamp(min=-20)
        assert ((scores.amax(-1) - level) / math.log(2) > 60).all(), call
    # more blocks than an H200 has multiprocessors, so that programs have several
    assert max(-(-call.n // rules.BLOCK_M) * call.batch * 2 for call in calls) > 132


def test_a_card_that_is_no_hopper(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.here(["hopper", "terms"], CPU) == ["terms"]
    assert "hopper: not run" in capsys.readouterr().out
    assert script.here(["terms"], CPU) == ["terms"] and capsys.readouterr().out == ""


TOOL = """#!/bin/sh
echo "Call(first)"; echo "Call(second)"; echo "{finding}"; echo "Call(third)"; echo "Call(fourth)"
{then}
echo "calls 5, by the kernel for Hopper {served}"
echo "========= ERROR SUMMARY: {summary}"
exit {code}
"""


@pytest.mark.parametrize(
    ("group", "fields", "problem"),
    [
        ("terms", {}, None),
        ("hopper", {"served": "1"}, None),
        ("hopper", {}, "served none"),
        ("terms", {"finding": "== a read", "summary": "1 error", "code": "9"},
         "Call(second)\n== a read\nCall(fourth)\n"),
        ("terms", {"then": "exec sleep 60"}, f"{script.NOT_DONE} 2 s, it had said:"),
    ],
)  # fmt: skip
def test_what_a_tool_says(
    group: str,
    fields: dict[str, str],
    problem: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "PARTS", 2)
    file = tmp_path / "tool"
    usual = {"finding": "==", "then": "", "served": "0", "summary": "0 errors", "code": "0"}
    file.write_text(TOOL.format(**usual | fields))
    file.chmod(0o755)
    patience = 2.0 if "then" in fields else 60.0
    found = script.under("memcheck", str(file), group, patience)
    assert found["clean"] == (problem is None) == (found["problems"] == [])
    assert all(problem in told for told in found["problems"] if problem is not None)
    if problem is None:
        assert (found["calls"], found["by_hopper"]) == (10, 2 * (group == "hopper"))


def test_one_part_is_told_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the script starts itself."""
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(script, "compute", lambda *words: told.append(words))
    monkeypatch.setattr(sys, "argv", ["script", "--only", "cosine", "--part", "3"])
    assert script.main() == 0 and told == [("cosine", 3)]
