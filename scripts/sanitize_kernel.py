"""Run the operator's kernels under compute-sanitizer, with every kind of term.

python scripts/sanitize_kernel.py [--tools memcheck racecheck] [--only terms cosine trained hopper]
                                  [--resume] [--timeout SECONDS] [--output FILE.json]

The script starts itself under each tool, in several processes, once for each group of calls
(`sanitizer_calls.py`): every kind of bias of the operator's tests in fp16, bf16 and fp32, at sizes
that no block divides, without gradients ("terms"); cosine attention with a scale for each head,
with gradients and without ("cosine"); every kind with gradients of its terms, as they are by
default and with atomics ("trained"); and, on a Hopper, calls of any length for its own kernel
("hopper"), whose number is told. Of the last ones racecheck has fewer and smaller ones, which have
every form of the kernel; there it reports how Triton hands work to specialised warps, too, which is
counted as "handed_over" and is no problem (`sanitizer_races.py`). All other hazards are listed in
whole, each with its call. The file is written after every run; --resume keeps those of as many
calls on the same card and version of torch that came to their end. Exit code 1 if a tool found
something or could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sanitizer_calls import GROUPS, calls_of, run
from sanitizer_races import read

from flashbias_convert.attention.hopper import rules

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
#: where CUDA's own packages put it, if it is in no path
USUAL = "/usr/local/cuda/bin/compute-sanitizer"
#: processes at a time: most of the time goes to compiling, and racecheck's to what it notes
PARTS = {"racecheck": 16}
USUAL_PARTS = 12
#: what a tool that has found something exits with
FOUND = 9
#: of a part that had no time left
NOT_DONE = "not done in"
#: that is kept of what a part has said: the first findings, and the end
FIRST, LAST = 1500, 700


def compute(group: str, tool: str, part: int) -> None:
    """Every so many-th call of a group, each after its name; tells how many there were at last."""
    own, served = calls_of(group, tool)[part :: parts_of(tool)], 0
    for call in own:
        print(call, flush=True)
        served += run(call, torch.device("cuda"))
    print(f"calls {len(own)}, by the kernel for Hopper {served}")


def parts_of(tool: str) -> int:
    """Processes at a time."""
    return PARTS.get(tool, USUAL_PARTS)


@dataclass(frozen=True)
class Part:
    """What a part of a group has come to.

    Attributes:
        said: what it, and the tool, have printed.
        code: that it has exited with; None: its time was over.
    """

    said: str
    code: int | None

    def counts(self) -> tuple[int, int] | None:
        """Calls, and those that the kernel for Hopper served; None: it did not come to its end."""
        end = re.search(r"^calls (\d+), by .* (\d+)$", self.said, re.MULTILINE)
        return (int(end[1]), int(end[2])) if end else None

    def summary(self) -> str | None:
        """The tool's."""
        found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", self.said)
        return found[1] if found else None


def under(tool: str, sanitizer: str, group: str, timeout: float) -> dict[str, Any]:
    """Run all parts of a group under a tool, at the same time; returns what it found."""
    started, calls = time.perf_counter(), len(calls_of(group, tool))
    ended = _run_parts(tool, sanitizer, group, min(parts_of(tool), calls), timeout)
    judge = _races if tool == "racecheck" else _errors
    broken = [problem for part in ended for problem in judge(part, timeout)]
    counts = [part.counts() or (0, 0) for part in ended]
    made, served = (sum(column) for column in zip(*counts, strict=True))
    if made != calls and not broken:
        broken.append(f"{made} of {calls} calls were made")
    if group == "hopper" and not served:
        broken.append("the kernel for Hopper served none of the calls")
    races = {"handed_over": sum(read(part.said).handed_over for part in ended)}
    return {
        "tool": tool,
        "group": group,
        "clean": not broken,
        "summaries": sorted({part.summary() for part in ended} - {None}),
        **(races if tool == "racecheck" else {}),
        "calls": made,
        "of": calls,
        "by_hopper": served,
        "seconds": round(time.perf_counter() - started, 1),
        "problems": broken,
    }


def _run_parts(tool: str, sanitizer: str, group: str, parts: int, timeout: float) -> list[Part]:
    started = time.perf_counter()
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool == "racecheck":
        command += ["--print-limit", "0"]  # a hazard that is not told might be any
    command += [sys.executable, __file__, "--tools", tool, "--only", group]
    # torch's allocator would hide reads beyond the end of a tensor
    own = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = [
        subprocess.Popen([*command, "--part", str(part)], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, env=own, start_new_session=True)
        for part in range(parts)
    ]  # fmt: skip
    ended = []
    for process in running:
        try:
            left = max(1.0, timeout - (time.perf_counter() - started))
            ended.append(Part(process.communicate(timeout=left)[0], process.returncode))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool, and what it runs
            ended.append(Part(_rest(process), None))
    return ended


def _errors(part: Part, timeout: float) -> list[str]:
    """All that a part has said, shortened, if there is a problem."""
    if part.code is None:
        return [_short(f"{NOT_DONE} {timeout:.0f} s, it had said:\n{part.said}")]
    summary = part.summary()
    if part.code != 0 or part.counts() is None or not (summary and summary.startswith("0 ")):
        return [_short(part.said)]
    return []


def _races(part: Part, timeout: float) -> list[str]:
    """Every hazard but those of work that is handed over, and all else that is a problem."""
    log = read(part.said)
    found = log.problems()
    if part.code is None:
        return [f"{NOT_DONE} {timeout:.0f} s, the last call was {log.last}", *found]
    if part.counts() is None:
        found.append("\n".join(["ended early, it had said:", log.last, *log.said]))
    if not log.summaries:
        found.append(f"no summary, the last call was {log.last}")
    # hazards that are only warnings leave the exit code as it is
    if part.code not in ((0, FOUND) if log.hazards else (0,)):
        found.append(f"exit code {part.code}, the last call was {log.last}")
    return found


def _rest(process: subprocess.Popen[str]) -> str:
    """What a killed process has said; nothing if the card does not let it die."""
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        return ""


def _short(text: str) -> str:
    """Without calls of which nothing was found, but for the last one; first and last findings."""
    text = re.sub(r"^Call\(.*\n(?=Call\()", "", text, flags=re.MULTILINE)
    return text if len(text) <= FIRST + LAST else f"{text[:FIRST]} ... {text[-LAST:]}"


def kept(file: Path, where: dict[str, str]) -> list[dict[str, Any]]:
    """The runs of a file that need not be made again; says why if there are none.

    Args:
        file: of a run before.
        where: card and version of torch, which must be the same.
    """
    if not file.is_file():
        return []
    known = json.loads(file.read_text())
    found = {name: known.get(name) for name in where}
    if found != where:
        print(f"{file.name}: runs of {', '.join(map(str, found.values()))} are made again")
        return []
    return [
        row for row in known["runs"]
        if row.get("group") in GROUPS and row["of"] == len(calls_of(row["group"], row["tool"]))
        and not any(x.startswith(NOT_DONE) for x in row["problems"])
    ]  # fmt: skip


def run_all(
    sanitizer: str, options: argparse.Namespace, where: dict[str, str]
) -> list[dict[str, Any]]:
    """What every tool has found in each group, those of before included; written after each."""
    rows = kept(options.output, where) if options.resume else []
    known = [(row["group"], row["tool"]) for row in rows]
    wanted = [(group, tool) for group in options.only for tool in options.tools]
    for group, tool in wanted:
        if (group, tool) in known:
            continue
        rows.append(under(tool, sanitizer, group, options.timeout))
        print(rows[-1], flush=True)
        options.output.write_text(json.dumps({**where, "runs": rows}, indent=2) + "\n")
    return [row for row in rows if (row["group"], row["tool"]) in wanted]


def here(groups: list[str], device: torch.device) -> list[str]:
    """The groups that a card can run; says which one it cannot."""
    if "hopper" not in groups or rules.is_there(device):
        return groups
    print("hopper: not run, this is no Hopper, or its kernel does not know this Triton", flush=True)
    return [group for group in groups if group != "hopper"]


def main() -> int:
    """Run every tool; write and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="*", default=list(TOOLS))
    parser.add_argument("--only", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--resume", action="store_true", help="keep the runs of the output")
    parser.add_argument("--timeout", type=float, default=550.0, help="seconds, of a run")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/sanitizer.json")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        (group,), (tool,) = options.only, options.tools
        compute(group, tool, options.part)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or (USUAL if Path(USUAL).exists() else None)
    if sanitizer is None:
        print("compute-sanitizer is not installed here", file=sys.stderr)
        return 1
    options.only = here(options.only, torch.device("cuda"))
    where = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows = run_all(sanitizer, options, where)
    return 0 if all(row["clean"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
