"""Calls that run under the sanitizer, and runs of it that need not be made again."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import sanitize_kernel as script
import sanitizer_calls
import sanitizer_races
from sanitizer_calls import GROUPS, KINDS, Call, calls_of, run

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
                "of": len(calls_of(group, tool)), "problems": told}  # fmt: skip

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
    assert {call.bias for call in GROUPS["terms"]()} == {*BIASES, "pairs"}
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
    assert max(-(-call.n // (2 * rules.ROWS)) * call.batch * 2 for call in calls) > 132


class _Found(Exception):
    """Instead of a launch."""


def forms(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, Any]]:
    """What of the kernel for Hopper serves calls, with their dtype, which decides on passes."""
    found: set[tuple[str, Any]] = set()
    form_of = rules.form_of

    def noted(*words: Any, **options: Any) -> None:
        found.add((call.dtype, form_of(*words, **options)))
        raise _Found

    with monkeypatch.context() as patch:
        patch.setattr(rules, "form_of", noted)
        for call in calls:
            with pytest.raises(_Found):
                run(call, CPU)
    return found


@pytest.mark.skipif(INTERPRETED, reason="has run without the interpreter")
def test_racecheck_has_smaller_calls_of_every_form(
    hopper: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_calls, fewer = (calls_of("hopper", tool) for tool in ("memcheck", "racecheck"))
    assert len(fewer) == len(set(fewer)) < len(all_calls) == len(GROUPS["hopper"]())
    assert max(call.batch for call in fewer) == 2
    assert forms(fewer, monkeypatch) == forms(all_calls, monkeypatch)
    late = [call for call in fewer if call.bias.startswith("late")]
    assert all(-(-call.n // (2 * rules.ROWS)) * 2 > call.multiprocessors > 0 for call in late)
    assert calls_of("terms", "racecheck") == GROUPS["terms"]()


@pytest.mark.parametrize("number", [0, 3])
def test_a_call_may_believe_the_card_to_be_small(
    number: int, hopper: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    serve = plan.HopperPlan.run

    def noted(own: Any, device: torch.device, *words: Any) -> None:
        seen.append(plan.multiprocessors_of(device))
        serve(own, device, *words)

    monkeypatch.setattr(plan.HopperPlan, "run", noted)
    known = plan.multiprocessors_of(CPU)
    run(Call("bfloat16", "late-key", 130, 64, hopper=True, multiprocessors=number), CPU)
    assert seen == [number or known] and plan.multiprocessors_of(CPU) == known


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
    monkeypatch.setattr(script, "USUAL_PARTS", 2)
    calls = GROUPS[group]()[:10]
    monkeypatch.setitem(GROUPS, group, lambda: calls)
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
    told: list[tuple[str, str, int]] = []
    monkeypatch.setattr(script, "compute", lambda *words: told.append(words))
    words = ["script", "--tools", "a", "--only", "cosine", "--part", "3"]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 0 and told == [("cosine", "a", 3)]


# -- hazards ---------------------------------------------------------------------------------

REST = "causal={}, cosine=False, entries=1, trained=False, hopper=True)"
#: from a run on an H200, whose kernel was defined at line 73 of its file, and the statement that
#: hands work over was at 128
RACES = f"""========= COMPUTE-SANITIZER
Call(dtype='float16', bias='low_rank', n=580, d=64, batch=2, {REST.format(True)}
========= Error: Race reported between Read access at attention_kernel+0xf0 in kernel.py:73
=========     and Write access at attention_kernel+0x4810 in kernel.py:73 [59 hazards]
=========     and Write access at attention_kernel+0x7b90 in kernel.py:128 [53 hazards]
========= 
Call(dtype='bfloat16', bias='late-stretch', n=580, d=64, batch=2, {REST.format(False)}
========= Error: Race reported between Read access at attention_kernel+0x110 in kernel.py:73
=========     and Write access at attention_kernel+0x5cf0 in kernel.py:73 [14 hazards]
=========     and Write access at attention_kernel+0x99e0 in kernel.py:128 [16 hazards]
========= 
========= Error: Race reported between Write access at attention_kernel+0x5d00 in kernel.py:73
=========     and Read access at attention_kernel+0x220 in kernel.py:73 [4 hazards]
=========     and Read access at attention_kernel+0x3f30 in kernel.py:73 [4 hazards]
========= 
Call(dtype='bfloat16', bias='key_bias', n=132, d=128, batch=2, {REST.format(True)}
calls 12, by the kernel for Hopper 4
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""
CALL = RACES.splitlines()[6]
HAZARD = "\n".join(RACES.splitlines()[7:10])
END = RACES[RACES.index("calls 12") :]


@pytest.fixture
def races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Twelve calls under a tool that says what racecheck has said, in one part."""
    calls = calls_of("hopper", "racecheck")[:12]
    monkeypatch.setitem(GROUPS, "hopper", lambda: calls)
    monkeypatch.setattr(script, "PARTS", {"racecheck": 1})
    monkeypatch.setattr(sanitizer_races, "hand_over", lambda: frozenset({73, 128}))

    def run(text: str, code: int = script.FOUND, then: str = "", seconds: float = 60.0) -> Any:
        log, tool = tmp_path / "log", tmp_path / "tool"
        log.write_text(text)
        tool.write_text(f"#!/bin/sh\ncat {log}\n{then}\nexit {code}\n")
        tool.chmod(0o755)
        return script.under("racecheck", str(tool), "hopper", seconds)

    return run


def test_work_that_is_handed_over_is_no_race(races: Callable[..., dict[str, Any]]) -> None:
    for code in (0, script.FOUND):
        found = races(RACES, code)
        assert found["clean"] and found["problems"] == [] and found["handed_over"] == 3
        assert (found["calls"], found["of"], found["by_hopper"]) == (12, 12, 4)
        assert found["summaries"] == ["3 hazards displayed (3 errors, 0 warnings)"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x5cf0 in kernel.py:73", "0x5cf0 in steps.py:73"),
        ("0x110 in kernel.py:73", "0x110 in steps.py:61"),
        ("0x99e0 in kernel.py:128", "0x99e0 in kernel.py:65"),
        ("attention_kernel+0x110", "lengths_kernel+0x110"),
        ("attention_kernel+0x99e0 in kernel.py:128", "attention_kernel+0x99e0"),
        ("0x5cf0 in kernel.py:73", "0x5cf0 in triton_forward.py:73"),
    ],
)
def test_any_other_hazard_is_told_with_its_call(
    old: str, new: str, races: Callable[..., dict[str, Any]]
) -> None:
    assert RACES.count(old) == 1
    found = races(RACES.replace(old, new))
    assert not found["clean"] and found["handed_over"] == 2
    assert found["problems"] == ["\n".join([CALL, HAZARD.replace(old, new)])]


def test_an_access_that_is_alone(races: Callable[..., dict[str, Any]]) -> None:
    first, *others = HAZARD.splitlines()
    found = races(RACES.replace(HAZARD, first))
    assert not found["clean"] and found["problems"] == [f"{CALL}\n{first}"]
    found = races(RACES.replace(f"{first}\n", ""))
    assert not found["clean"] and others[0] in found["problems"][0]


def test_many_hazards_are_told_in_whole(races: Callable[..., dict[str, Any]]) -> None:
    own = HAZARD.replace("kernel.py", "tiles.py") + "\n========= \n"
    text = RACES.replace(END, own * 100 + END.replace("3 hazards", "103 hazards"))
    found = races(text)
    assert found["handed_over"] == 3 and len(found["problems"]) == 100
    assert all(own.strip("\n= ") in problem for problem in found["problems"])


@pytest.mark.parametrize(
    ("old", "new", "code", "problem"),
    [
        ("SUMMARY: 3", "SUMMARY: 4", 9, "4 hazards in the summary, 3 in the log"),
        ("SUMMARY: 3", "SUMMARY: 2", 9, "2 hazards in the summary, 3 in the log"),
        ("========= RACECHECK SUMMARY: 3", "a summary: 3", 9, "no summary"),
        ("calls 12,", "========= Target application returned an error\ncalls 12,", 9, "returned"),
        ("calls 12,", "calls 11,", 9, "11 of 12 calls"),
        ("calls 12,", "RuntimeError: not finite", 9, "RuntimeError: not finite"),
        ("Hopper 4", "Hopper 0", 9, "served none"),
        ("calls 12,", "calls 12,", 1, "exit code 1"),
        (RACES[RACES.index("Call") : RACES.index(END)], "", 9, "3 hazards in the summary, 0"),
    ],
)
def test_what_else_is_a_problem(
    old: str, new: str, code: int, problem: str, races: Callable[..., dict[str, Any]]
) -> None:
    assert RACES.count(old) == 1
    found = races(RACES.replace(old, new), code)
    assert not found["clean"] and any(problem in told for told in found["problems"])


def test_no_hazards_and_yet_an_error(races: Callable[..., dict[str, Any]]) -> None:
    text = END.replace("3 hazards", "0 hazards")
    assert races(text, 0)["clean"]
    (problem,) = races(text, script.FOUND)["problems"]
    assert "exit code 9" in problem


def test_racecheck_that_has_no_time_left(races: Callable[..., dict[str, Any]]) -> None:
    own = HAZARD.replace("kernel.py:128", "steps.py:61")
    found = races(RACES.replace(HAZARD, own).replace(END, ""), 0, "exec sleep 60", 2.0)
    assert not found["clean"] and found["handed_over"] == 2 and found["calls"] == 0
    late, other = found["problems"][:2]
    assert late.startswith(script.NOT_DONE) and "key_bias" in late and own in other


def test_where_work_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the source of the kernel; a source without it is an error."""
    source = sanitizer_races.SOURCE.read_text().splitlines()
    texts = [source[line - 1].strip() for line in sorted(sanitizer_races.hand_over())]
    first, definition, *others = [text.split("(")[0] for text in texts]
    assert first == "@gluon.jit" and definition == f"def {sanitizer_races.KERNEL}"
    assert set(others) == {"if GROUPS == 1:", "gl.warp_specialize"}
    assert sum("gl.warp_specialize(" in line for line in source) == others.count(
        "gl.warp_specialize"
    )
    file = tmp_path / "kernel.py"
    monkeypatch.setattr(sanitizer_races, "SOURCE", file)
    file.write_text("def attention_kernel(\n):\n    one()\n    gl.warp_specialize(\n    )\n")
    assert sanitizer_races.hand_over.__wrapped__() == {1, 4}
    file.write_text("def attention_kernel():\n    one()\n")
    with pytest.raises(ValueError, match="hands nothing over"):
        sanitizer_races.hand_over.__wrapped__()
