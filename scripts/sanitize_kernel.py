"""Run the forward kernels under compute-sanitizer, with every kind of term.

python scripts/sanitize_kernel.py [--tools memcheck racecheck] [--backward] [--resume]
                                  [--output FILE.json]

The script starts itself under each tool, in several processes; every kind of bias of the
operator's tests is computed once in fp16, bf16 and fp32, at sizes that no block divides, some as
cosine attention with a scale that is learnt for each head, in windows that blocks divide, and a
dense one with launch settings that have two entries of the batch a program. With --backward all
terms are trained, too. A tool slows a kernel down a hundred times, so the sizes are small. The file
is written after every tool; --resume keeps the runs of as many calls on the same card and version
of torch that came to their end. Exit code 1 if a tool found something or could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
#: where CUDA's own packages put it, if it is in no path
USUAL = "/usr/local/cuda/bin/compute-sanitizer"
SIZES = ((40, 16), (150, 32), (150, 64))
DTYPES = ("float16", "bfloat16", "float32")
#: processes at a time: most of the time goes to compiling
PARTS = 12
#: N and D of windows, as SwinV2 has them, and kinds of bias that are computed there
WINDOWS = ((256, 24), (256, 48), (64, 48))
OF_WINDOWS = ("none", "low_rank", "low_rank-unsplit-ranks", "regions", "heads-differ")
#: kinds of bias that are computed with two entries a program, too
TWO_ENTRIES = ("dense",)
#: of a part that had no time left
NOT_DONE = "not done in"


def cases() -> list[tuple[int, int, str, str, dict[str, int]]]:
    """Sizes N and D, dtype, kind of bias and unusual launch settings of every call.

    Sizes of `WINDOWS` stand for cosine attention.
    """
    sys.path.insert(0, str(ROOT))
    from tests.attention.cases import BIASES

    n, d = SIZES[1]
    usual = [(n, d, dtype, name, {}) for n, d in SIZES for dtype in DTYPES for name in BIASES]
    entries = [(n, d, dtype, name, {"entries": 2}) for dtype in DTYPES[:2] for name in TWO_ENTRIES]
    windows = [
        (*size, dtype, name, {}) for size in WINDOWS for dtype in DTYPES for name in OF_WINDOWS
    ]
    return [*usual, *windows, *entries]


def compute(part: int, backward: bool) -> int:
    """Every `PARTS`-th call once; returns how many that are."""
    import torch

    own = cases()[part::PARTS]
    from flashbias_convert.attention import flashbias_attention, launch
    from flashbias_convert.attention.tuning import LaunchSettings
    from tests.attention.cases import BIASES, Inputs

    for n, d, dtype, name, settings in own:
        inputs = Inputs(torch.device("cuda"), getattr(torch, dtype), n=n, d=d)
        # what is kept for a backward pass is written by one entry a program
        trained = backward and not settings
        qkv = [x.requires_grad_(trained) for x in (inputs.q, inputs.k, inputs.v)]
        bias = BIASES[name](inputs)
        if trained and bias is not None:
            bias = _trained(bias)
        options: dict[str, Any] = {}
        if (n, d) in WINDOWS:
            scale = torch.full((inputs.heads,), 5.0, device="cuda", requires_grad=trained)
            options = {"cosine": True, "scale": scale}
        forced = launch.forced(LaunchSettings(32, 32, 4, 2, **settings))
        with forced if settings else contextlib.nullcontext():
            out = flashbias_attention(*qkv, bias, backend="triton", **options)
        if trained:
            out.sum().backward()
        torch.cuda.synchronize()
        if not bool(out.isfinite().all()):
            raise RuntimeError(f"{name}, {dtype}: the result is not finite")
    return len(own)


def _trained(bias: Any) -> Any:
    """The same bias with tensors that ask for gradients."""

    def ask(_: str, tensor: Any) -> Any:
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    return dataclasses.replace(bias, terms=tuple(term.map_tensors(ask) for term in bias.terms))


def under(tool: str, sanitizer: str, backward: bool, timeout: float) -> dict[str, Any]:
    """Run all parts under a tool, at the same time; returns what it found."""
    started = time.perf_counter()
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
    command += ["--backward"] if backward else []
    # torch's allocator would hide reads beyond the end of a tensor
    own = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = [
        subprocess.Popen([*command, "--part", str(part)], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, env=own, start_new_session=True)
        for part in range(PARTS)
    ]  # fmt: skip
    said = []
    for process in running:
        try:
            left = max(1.0, timeout - (time.perf_counter() - started))
            said.append(process.communicate(timeout=left)[0])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool, and what it runs
            said.append(f"{NOT_DONE} {timeout:.0f} s")
    found = [re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text) for text in said]
    done = [re.search(r"^calls (\d+)$", text, re.MULTILINE) for text in said]
    broken = [
        text[-700:]
        for process, text, end, summary in zip(running, said, done, found, strict=True)
        # hazards that are only warnings leave the exit code as it is
        if process.returncode != 0 or end is None or not (summary and summary[1].startswith("0 "))
    ]
    return {
        "tool": tool,
        "backward": backward,
        "clean": not broken,
        "summaries": sorted({summary.group(1) for summary in found if summary}),
        "calls": sum(int(end.group(1)) for end in done if end),
        "of": len(cases()),
        "seconds": round(time.perf_counter() - started, 1),
        "problems": broken,
    }


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
        run for run in known["runs"]
        if run["of"] == len(cases()) and not any(x.startswith(NOT_DONE) for x in run["problems"])
    ]  # fmt: skip


def run_all(
    sanitizer: str, options: argparse.Namespace, where: dict[str, str]
) -> list[dict[str, Any]]:
    """What every tool has found, those of before included; written after each."""
    rows = kept(options.output, where) if options.resume else []
    known = [(row["tool"], row["backward"]) for row in rows]
    for tool in options.tools:
        if (tool, options.backward) in known:
            continue
        rows.append(under(tool, sanitizer, options.backward, options.timeout))
        print(rows[-1], flush=True)
        options.output.write_text(json.dumps({**where, "runs": rows}, indent=2) + "\n")
    return [r for r in rows if r["tool"] in options.tools and r["backward"] == options.backward]


def main() -> int:
    """Run every tool; write and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="*", default=list(TOOLS))
    parser.add_argument("--backward", action="store_true", help="gradients too")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the output")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, a tool")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/sanitizer.json")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(f"calls {compute(options.part, options.backward)}")
        return 0
    sanitizer = shutil.which("compute-sanitizer") or (USUAL if Path(USUAL).exists() else None)
    if sanitizer is None:
        print("compute-sanitizer is not installed here", file=sys.stderr)
        return 1
    import torch

    where = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows = run_all(sanitizer, options, where)
    return 0 if all(row["clean"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
