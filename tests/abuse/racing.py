"""Two processes write the same output at once, again and again.

python -m tests.abuse.racing FOLDER TIMES

A process of its own, because it forks. Prints one JSON object: for each kind of output how the two
writers ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch

from flashbias_convert.checkpoint.write import write_file, write_folder
from flashbias_convert.errors import UsageError

from .killing import Writer, content, plan

MODES = ("file", "folder", "forced file", "forced folder")
WROTE, REFUSED = 0, 3


def writer(root: Path, mode: str) -> Writer:
    """A writer of one kind; with force where the mode says so."""
    force = mode.startswith("forced")
    if mode.endswith("file"):
        final = root / "out.safetensors"
        return Writer(final, lambda v: write_file(final, content(v), plan(v), force=force), False)
    final, source = root / "out", root / "source"
    source.mkdir()

    def write(version: int) -> None:
        write_folder(final, content(version), plan(version), source=source, force=force)

    return Writer(final, write, False)


def started(tried: Writer, version: int, pipe: tuple[int, int]) -> int:
    """The process id of a writer that begins when its parent has closed the pipe."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        start, hold = pipe
        os.close(hold)
        os.read(start, 1)  # returns when nobody holds the other end
        tried.write(version)
        code = WROTE
    except UsageError as error:
        code = REFUSED if "exists" in str(error) else 1
    finally:
        os._exit(code)


def race(tried: Writer) -> list[int]:
    """Exit codes of the writers of versions 1 and 2."""
    pipe = os.pipe()
    children = [started(tried, version, pipe) for version in (1, 2)]
    for end in pipe:
        os.close(end)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    """Race writers of every kind, each in a folder of its own."""
    torch.set_num_threads(1)  # a fork has no other threads
    root, times = Path(sys.argv[1]), int(sys.argv[2])
    told = {}
    for mode in MODES:
        (root / mode).mkdir()
        tried = writer(root / mode, mode)
        ended: Counter[str] = Counter()
        for _ in range(times):
            tried.prepare()
            codes = race(tried)
            state = tried.state()
            if mode.startswith("forced"):
                assert codes == [WROTE, WROTE], codes
                assert state in ("version 1", "version 2"), state
            else:
                assert sorted(codes) == [WROTE, REFUSED], codes
                assert state == f"version {codes.index(WROTE) + 1}", (codes, state)
            ended["one whole, the other refused" if REFUSED in codes else "the last one whole"] += 1
        assert not [p for p in (root / mode).iterdir() if p.name.startswith(".")], "leftovers"
        told[mode] = ended
    print(json.dumps(told))


if __name__ == "__main__":
    main()
