"""Where the time of a whole model goes: kernels of one call, by what they do.

python scripts/profile_models.py [--models NAME...] [--variants NAME...] [--tiny] [--device cpu]

Models and variants are those of `bench_models.py`. A few calls run under torch.profiler, after some
that compile and warm up; every kernel is put into a class by its name, milliseconds are per call.
An original that writes its attention as matrix products has those products among the others: only
its softmax counts as attention. A kernel of torch.compile that fuses several things belongs to the
first class that its name tells of. "wall_ms" is a call by the clock, profiler included: what it
exceeds the kernels by is a card that waits for the host. On the CPU operators stand in for kernels,
to show that the script runs.

Besides the table there is one of all kernels, NAME_kernels.csv, and a picture. Every row has a
process of its own, see `turns.py`.
"""

from __future__ import annotations

import argparse
import csv
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from bench_models import all_cases
from failures import lacked_beside_others
from turns import Wait, in_turns
from whole_models.case import ROOT, Prepared, split_variant
from whole_models.measuring import compiled
from whole_models.running import chosen
from whole_models.writing import machine, read_rows

from flashbias_convert.benchmark.rows import failure

MODELS = ("swinv2-b", "gpt2-prefill-2k")
WAYS = ("original", "flex", "flex-alibi", "none", "ours", "exact")
#: torch.compile names pointwise kernels and reductions after the products that they go with, too
_WHOLE = r"^(?!triton_(poi|per|red)_)"
#: classes of kernels, and what tells them: the first that matches wins
CLASSES = {
    "attention": rf"{_WHOLE}.*(attention|fmha|flash_fwd|flash::|sdpa|flex)|softmax",
    "matrix products": rf"{_WHOLE}.*(gemm|cutlass|cublas|nvjet|xmma|splitk|conv(?!ert)|matmul"
                       r"|(^|[^a-z])(add|b|badd)?mm([^a-z]|$)|linear)",
    "normalisation and activation": r"norm|gelu|silu|relu|tanh|sigmoid",
    "copies and casts": r"copy|memcpy|memset|catarray|(^|[^a-z])cat([^a-z]|$)|clone|transpose"
                        r"|permute|roll|contiguous|fill|convert|index|gather",
    "other": r"",
}  # fmt: skip
_KEYS = {name: f"{name.replace(' ', '_')}_ms" for name in CLASSES}
COLUMNS = ("model", "variant", "status", "reason", *_KEYS.values(), "kernels_ms", "wall_ms",
           "launches", "batch", "dtype", "device", "torch", "triton")  # fmt: skip
KERNELS = ("model", "variant", "class", "kernel", "ms", "launches")
_COLORS = ("#2f6fab", "#c0504d", "#6a9a5b", "#e0a458", "#bdbdbd")
_WARMUP, _CALLS = 3, 3


def class_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    return next(name for name, known in CLASSES.items() if re.search(known, kernel.lower()))


def profiled(ready: Prepared, model: Any, device: torch.device) -> tuple[list[Any], float]:
    """Kernels of a call with their milliseconds and numbers of launches; and its own milliseconds.

    Args:
        ready: has the inputs.
        model: what is called.
        device: CUDA, or the CPU, whose operators are taken for kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    on_card = device.type == "cuda"

    def wait() -> None:
        if on_card:
            torch.cuda.synchronize(device)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    wait()
    with profile(activities=activities) as found:
        started = time.perf_counter()
        for _ in range(_CALLS):
            model(*ready.args, **ready.kwargs)
        wait()
        wall = 1e3 * (time.perf_counter() - started) / _CALLS
    kernels = []
    for event in found.key_averages():
        if on_card != (event.device_type == torch.autograd.DeviceType.CUDA) or _is_a_range(event):
            continue
        spent = event.self_device_time_total if on_card else event.self_cpu_time_total
        if spent > 0 and (on_card or event.key.startswith("aten::")):
            kernels.append((event.key, spent / 1e3 / _CALLS, event.count / _CALLS))
    return kernels, wall


def _is_a_range(event: Any) -> bool:
    """Whether it is what somebody called a stretch of time, and no kernel."""
    named = event.key.startswith(("## Call", "Torch-Compiled Region"))
    return named or bool(getattr(event, "is_user_annotation", False))


@torch.no_grad()
def profile_job(name: str, variant: str, options: argparse.Namespace, wait: Wait) -> None:
    """Profile one row in this process, and write it."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    case = all_cases(options.tiny)[name]
    row = {"model": case.name, "variant": variant, "batch": case.batch, "status": "measured"}
    waited, kernels = False, []
    try:
        way, mode = split_variant(variant)
        ready = case.prepare(way, device, dtype)
        model = compiled(ready.model, mode)
        model(*ready.args, **ready.kwargs)
        waited = True
        wait()
        for _ in range(_WARMUP):
            model(*ready.args, **ready.kwargs)
        kernels, wall = profiled(ready, model, device)
        row |= {**in_classes(kernels), "wall_ms": f"{wall:.4f}"}
    except Exception as error:  # how a variant fails is its result
        if lacked_beside_others(error):
            raise
        row |= {"status": "failed", "reason": failure(error)}
    if not waited:
        wait()
    _write(options.output, COLUMNS, [{**row, **machine(device, dtype)}])
    lines = [
        {"model": case.name, "variant": variant, "class": class_of(kernel), "kernel": kernel,
         "ms": f"{ms:.5f}", "launches": f"{count:g}"}
        for kernel, ms, count in sorted(kernels, key=lambda one: -one[1])
    ]  # fmt: skip
    _write(kernel_path(options.output), KERNELS, lines)


def in_classes(kernels: Iterable[tuple[str, float, float]]) -> dict[str, str]:
    """Milliseconds by class, all of them, and the launches."""
    sums, launches = dict.fromkeys(CLASSES, 0.0), 0.0
    for kernel, ms, count in kernels:
        sums[class_of(kernel)] += ms
        launches += count
    found = {_KEYS[name]: f"{ms:.4f}" for name, ms in sums.items()}
    return {**found, "kernels_ms": f"{sum(sums.values()):.4f}", "launches": f"{launches:g}"}


def kernel_path(path: Path) -> Path:
    """The table of all kernels that belongs to a table."""
    return path.with_name(f"{path.stem}_kernels.csv")


def _write(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    first = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if first:
            writer.writeheader()
        writer.writerows(rows)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A stacked bar for every row, a panel for every model."""
    from flashbias_convert.plotting.figure import new_figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = new_figure(9.0, 0.6 + sum(1.2 + 0.28 * sum(r["model"] == m for r in rows)
                                       for m in models))  # fmt: skip
    for ax, model in zip(figure.subplots(len(models), squeeze=False).flat, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        left = [0.0] * len(own)
        for (name, key), color in zip(_KEYS.items(), _COLORS, strict=True):
            values = [float(row[key] or 0) for row in own]
            ax.barh(range(len(own)), values, left=left, color=color, label=name)
            left = [a + b for a, b in zip(left, values, strict=True)]
        for i, row in enumerate(own):
            said = f" {left[i]:.3g}" if left[i] else f" {row['reason'][:60]}"
            ax.text(left[i], i, said, va="center", fontsize=7)
        ax.set_yticks(range(len(own)), [row["variant"] for row in own], fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.1)
        ax.set_title(model, fontsize=9)
        ax.set_xlabel("ms of kernels per call", fontsize=8)
    # one for all, beside the bars
    figure.legend(*ax.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=5)
    figure.suptitle(f"{rows[0]['device']}, {rows[0]['dtype']}", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Profile, write, draw and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", default=list(MODELS))
    parser.add_argument("--variants", nargs="+", metavar="NAME",
                        default=[*WAYS, *(f"{way}-compiled" for way in WAYS)])  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--together", type=int, default=1, help="rows that compile at a time")
    parser.add_argument("--resume", action="store_true", help="add the rows that are not there")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/profile_models.csv")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for path in (options.output, kernel_path(options.output)):
            path.unlink(missing_ok=True)
    done = {(r["model"], r["variant"]) for r in _rows(options.output)}
    cases = all_cases(options.tiny)
    jobs = [
        (name, variant, options)
        for name in chosen(cases, options.models)
        for variant in chosen(cases[name].variants(), options.variants)
        if (cases[name].name, variant) not in done
    ]
    where = machine(torch.device(options.device), getattr(torch, options.dtype))
    for name, variant, _ in in_turns(profile_job, jobs, together=options.together):
        row = {"model": cases[name].name, "variant": variant, "status": "failed"}
        _write(options.output, COLUMNS, [{**row, "reason": "its process died", **where}])
    rows = _rows(options.output)
    for row in rows:
        print(*(row[name] for name in COLUMNS[:9]), sep="  ")
    if rows:
        draw(rows, options.output.with_suffix(".png"))


def _rows(path: Path) -> list[dict[str, str]]:
    return read_rows(path) if path.is_file() else []


if __name__ == "__main__":
    main()
