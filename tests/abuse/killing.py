"""Write again and again, kill each writer at some moment, and look at what is left.

python -m tests.abuse.killing FOLDER MOMENTS SEED

A process of its own, because it forks: the writers find everything imported. Prints one JSON
object: for each kind of writer how often it was killed, and what it left under the final name.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from flashbias_convert.checkpoint import read_plan
from flashbias_convert.checkpoint.write import write_file, write_folder
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.plan import Plan

from . import tiny
from .judge import snapshot

MODES = ("new file", "replaced file", "new folder", "replaced folder", "conversion")
SIZE = 4 * 2**20
#: the system calls of a commit
STEPS = ("fsync", "link", "rename", "replace", "unlink", "rmdir", "mkdir")


def content(version: int) -> dict[str, torch.Tensor]:
    """Tensors of 4 MB that say which version they are."""
    return {f"t{i}": torch.full((SIZE // 16,), float(version)) for i in range(4)}


def plan(version: int) -> Plan:
    return Plan(DecomposeOptions(), [], versions={"version": str(version)})


@dataclass
class Writer:
    """One kind of write.

    Attributes:
        final: the name under which something whole must be, or nothing.
        write: writes a version.
        before: what is there when the writer starts.
    """

    final: Path
    write: Callable[[int], None]
    replaces: bool

    def prepare(self) -> None:
        """As before the first write; hidden files stay."""
        for path in self.final.parent.glob("out*"):
            if path.is_dir():
                for child in path.iterdir():
                    child.unlink()
                path.rmdir()
            else:
                path.unlink()
        if self.replaces:
            self.write(0)

    def state(self) -> str:
        """What is under the final name; raises AssertionError if that is not whole."""
        if not self.final.exists():
            assert not self.sidecar().exists(), "a sidecar alone"
            return "nothing"
        weights = self.final / "model.safetensors" if self.final.is_dir() else self.final
        version = read_plan(weights).versions["version"]
        with safe_open(weights, framework="pt") as file:
            meant = content(int(version))
            assert set(file.keys()) == set(meant)
            assert all(torch.equal(file.get_tensor(k), v) for k, v in meant.items())
        if not self.sidecar().exists():
            return f"version {version} without its sidecar"
        assert json.loads(self.sidecar().read_text())["versions"]["version"] == version
        return f"version {version}"

    def sidecar(self) -> Path:
        if self.final.suffix == ".safetensors":
            return self.final.with_suffix(".plan.json")
        return self.final / "model.plan.json"


def writer(root: Path, mode: str) -> Writer:
    replaces = mode.startswith("replaced")
    if mode == "conversion":
        return Conversion.of(root)
    if mode.endswith("file"):
        final = root / "out.safetensors"
        return Writer(
            final, lambda v: write_file(final, content(v), plan(v), force=replaces), replaces
        )
    final, source = root / "out", root / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    return Writer(
        final,
        lambda v: write_folder(final, content(v), plan(v), source=source, force=replaces),
        replaces,
    )


class Conversion(Writer):
    """The whole of `convert_checkpoint`."""

    @classmethod
    def of(cls, root: Path) -> Conversion:
        good = root / "good"
        good.mkdir()
        source = tiny.Good.make(good).bare
        final = root / "out.safetensors"
        return cls(final, lambda v: _convert(source, final), replaces=False)

    def state(self) -> str:
        if not self.final.exists():
            assert not self.sidecar().exists(), "a sidecar alone"
            return "nothing"
        good = self.final.parent / "good" / "bare.flashbias.safetensors"
        with safe_open(self.final, framework="pt") as a, safe_open(good, framework="pt") as b:
            assert a.metadata() == b.metadata() and set(a.keys()) == set(b.keys())
            assert all(torch.equal(a.get_tensor(k), b.get_tensor(k)) for k in b.keys())  # noqa: SIM118
        return "whole" if self.sidecar().exists() else "whole without its sidecar"


def _convert(source: Path, final: Path) -> None:
    tiny.convert(source, final, arch=f"timm:{tiny.NAME}")


def killed_at(seconds: float, write: Callable[[int], None]) -> bool:
    """Whether a writer was still at work when it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            write(1)
            code = 0
        finally:
            os._exit(code)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed"
    return os.WIFSIGNALED(status)


def killed_at_step(step: int, write: Callable[[int], None]) -> bool:
    """Whether a writer got to its `step`-th change of names, where it kills itself."""
    child = os.fork()
    if child == 0:
        calls = itertools.count()
        for name in STEPS:
            setattr(os, name, _deadly(getattr(os, name), calls, step))
        write(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed"
    return os.WIFSIGNALED(status)


def _deadly(function: Callable[..., Any], calls: Iterator[int], step: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return call


def duration(tried: Writer) -> float:
    """Seconds that a writer takes, the middle one of three."""
    found = []
    for _ in range(3):
        tried.prepare()
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            tried.write(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, "the writer failed"
        found.append(time.perf_counter() - started)
    return sorted(found)[1]


def kill_often(root: Path, mode: str, moments: int, rng: random.Random) -> dict[str, Any]:
    """How writers of one kind ended, and how many hidden files they left."""
    root.mkdir()
    tried = writer(root, mode)
    inputs = [root / "source", root / "good"]
    before = [snapshot(folder) for folder in inputs]
    whole = duration(tried)
    ended: Counter[str] = Counter()
    for _ in range(moments):
        tried.prepare()
        killed = killed_at(rng.uniform(0, 1.1 * whole), tried.write)
        state = tried.state()
        ended[f"{'killed' if killed else 'finished before the kill'}, left {state}"] += 1
        assert not tried.replaces or mode == "replaced folder" or state != "nothing", "lost"
    for step in itertools.count():
        tried.prepare()
        killed = killed_at_step(step, tried.write)
        state = tried.state()
        assert not tried.replaces or mode == "replaced folder" or state != "nothing", "lost"
        if not killed:
            break
        ended[f"killed between two system calls, left {state}"] += 1
    assert [snapshot(folder) for folder in inputs] == before, "the input was changed"
    visible = {p.name for p in root.iterdir() if not p.name.startswith(".")}
    assert visible <= {"source", "good", "out", "out.safetensors", "out.plan.json"}, visible
    hidden = sum(p.name.startswith(".") for p in root.iterdir())
    tried.prepare()
    tried.write(1)  # a later run does not mind what is left
    assert tried.state() in ("version 1", "whole")
    return {"ended": ended, "hidden": hidden}


def main() -> None:
    """Kill writers of every kind, each in a folder of its own."""
    torch.set_num_threads(1)  # a fork has no other threads
    root, moments, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(sys.argv[3])
    print(json.dumps({mode: kill_often(root / mode, mode, moments, rng) for mode in MODES}))


if __name__ == "__main__":
    main()
