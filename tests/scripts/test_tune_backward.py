"""Tuning of the backward kernels: what is tried, and what of a step is timed."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import tune_backward as script
from backward_cases import KERNELS, MOST_HELD, Case
from turns import BESIDE

from flashbias_convert.attention.tuning import LaunchSettings

from .fake_pool import FakePool

CASES = [Case(k, d, c, False) for k in KERNELS for d in (32, 64, 128) for c in (0, 16)]


@pytest.mark.parametrize("case", CASES)
def test_what_is_tried_fits_registers(case: Case) -> None:
    tried = case.candidates()
    assert len(tried) == len(set(tried)) >= 7
    for settings in tried:
        rows = settings.block_m if case.kernel == "queries" else settings.block_n
        assert case.held(settings) <= MOST_HELD and rows >= 16 * settings.num_warps
    if case.d <= 64:
        assert case.present(4096) in tried
    else:
        assert LaunchSettings(128, 128, 4, 1) not in tried


@pytest.mark.parametrize("trained", [False, True])
def test_a_step_has_the_gradients_that_its_kernel_makes(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import measure_training_costs

    attend = measure_training_costs.flashbias_attention
    monkeypatch.setattr(
        measure_training_costs,
        "flashbias_attention",
        lambda *args, backend, **options: attend(*args, backend="eager", **options),
    )
    shapes = {}
    for kernel in KERNELS:
        step = Case(kernel, 16, 8, trained).step(24, 1, "cpu")
        shapes[kernel] = [tuple(x.shape) for x in step()]
    qkv, factors = (1, 8, 24, 16), [(8, 24, 8)] if trained else []
    assert shapes["queries"] == [qkv, *factors]
    assert shapes["keys"] == [qkv, qkv, *factors]
    assert shapes["all"] == [qkv, qkv, qkv, *factors, *factors]
    assert torch.is_grad_enabled()


class Run:
    """The script without kernels: what it compiles and times, in order, and its table.

    Attributes:
        compiled, timed: what was tried; a time is 1 ms but for `ms`.
        ends: called with everything that is timed, before it is.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        self.output, self.compiled, self.timed = folder / "table.csv", [], []
        self.states: dict[LaunchSettings, str | None] = {}
        self.ms: dict[LaunchSettings, float] = {}
        self.ends: Callable[[], None] = lambda: None
        self._monkeypatch = monkeypatch
        pool = FakePool()
        monkeypatch.setattr(script, "multiprocessing", pool)
        monkeypatch.setattr(script, "compile_one", self._compile)
        monkeypatch.setattr(script.backward_launch, "forced", self._forced)
        monkeypatch.setattr(script, "time_ms", self._time)
        monkeypatch.setattr(Case, "step", lambda self, n, *_: (self, n))

    def _compile(self, trial: script.Trial, n: int, device: str) -> str | None:
        self.compiled.append(trial)
        return self.states.get(trial[1], script.OK)

    def _forced(self, _: str, settings: LaunchSettings) -> contextlib.nullcontext[None]:
        self._now = settings
        return contextlib.nullcontext()

    def _time(self, step: tuple[Case, int]) -> float:
        assert (step[0], self._now) in self.compiled
        self.ends()
        self.timed.append((*step, self._now))
        if self.ms.get(self._now) == 0.0:
            raise RuntimeError("with other strides it fails")
        return self.ms.get(self._now, 1.0)

    def __call__(self, *words: str) -> list[dict[str, str]]:
        """The rows after a run."""
        self.compiled.clear()
        self.timed.clear()
        own = ["--kernels", "queries", "keys", "--head-sizes", "32", "--columns", "0",
               "--lengths", "4096", "1024", "--workers", "1", "--device", "cpu",
               "--output", str(self.output)]  # fmt: skip
        self._monkeypatch.setattr(sys, "argv", ["script", *own, *words])
        script.main()
        with self.output.open() as file:
            return list(csv.DictReader(file))


QUERIES, KEYS = (Case(kernel, 32, 0, False) for kernel in ("queries", "keys"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_kernel_is_timed_before_the_next_one_is_compiled(run: Run) -> None:
    def before() -> None:
        kernels = {case.kernel for case, _ in run.compiled}
        assert kernels == ({"queries"} if len(run.timed) < 2 * count else {"queries", "keys"})

    count = len(QUERIES.candidates())
    run.ends = before
    rows = run()
    assert len(rows) == len(run.timed) == 2 * (count + len(KEYS.candidates()))
    assert {r["state"] for r in rows} == {script.OK}
    assert len(run.compiled) == len(rows) / 2
    for n in ("4096", "1024"):
        assert sum(r["present"] == "1" for r in rows if r["n"] == n) == 2


def test_a_run_that_was_ended_goes_on(run: Run) -> None:
    """What has a row is neither compiled nor timed again, what failed or was slow included."""
    slow, fails, breaks = QUERIES.candidates()[1:4]
    assert QUERIES.present(4096) not in (slow, fails, breaks)
    run.ms = {slow: 2 * script.HOPELESS, breaks: 0.0}
    run.states = {fails: "OutOfResources: shared memory"}

    def ends() -> None:
        if len(run.timed) == 20:
            raise KeyboardInterrupt

    run.ends = ends
    with pytest.raises(KeyboardInterrupt):
        run()
    first = list(csv.DictReader(run.output.read_text().splitlines()))
    failed = [r for r in first if r["state"].startswith("OutOfResources")]
    assert [r["n"] for r in failed] == ["4096", "1024"] and len(first) == 22
    known = run.timed.copy()
    run.ends = lambda: None
    rows = run("--resume")
    assert rows[:22] == first
    assert not set(known) & set(run.timed)
    times = known + run.timed
    assert len(times) == len(set(times))
    count = len(QUERIES.candidates()) - 1
    # the slow and the broken one are not tried at the second length
    assert len([t for t in times if t[:2] == (QUERIES, 4096)]) == count
    assert len([t for t in times if t[:2] == (QUERIES, 1024)]) == count - 2
    assert fails not in [s for case, s in run.compiled if case == QUERIES]
    assert run("--resume") == rows and not run.compiled and not run.timed
    assert len(run()) == len(rows) and run.timed


def test_what_lacked_memory_beside_others_has_no_row(run: Run) -> None:
    lacks = QUERIES.candidates()[1]
    run.states = {lacks: None}
    rows = run("--kernels", "queries")
    assert lacks not in [settings for *_, settings in run.timed]
    run.states = {}
    every = run("--kernels", "queries", "--resume")
    assert run.compiled == [(QUERIES, lacks)] and len(every) == len(rows) + 2
    assert [t[1:] for t in run.timed] == [(4096, lacks), (1024, lacks)]


def test_the_clock_stops(run: Run) -> None:
    assert run.timed == []
    with pytest.raises(FileNotFoundError):
        run("--stop-s", "-1")
    assert run.compiled == run.timed == []


def test_failures_of_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Case, "step", lacks)
    trial = (QUERIES, QUERIES.present(64))
    assert script.compile_one(trial, 64, "cpu") == "OutOfMemoryError: CUDA out of memory"
    monkeypatch.setenv(BESIDE, "/nowhere")
    assert script.compile_one(trial, 64, "cpu") is None
