"""From which length on the kernel for Hopper is faster than the usual one, by head size and rank.

python scripts/tune_hopper.py [--head-sizes 64 128] [--columns 0 16 32 64 128] [--resume]
                              [--output FILE.csv]

About 2^31 scores a call, at most 64 heads times batch entries, by CUDA graph; both results are
compared with float64 on a slice. `attention/hopper/rules.py` has what was read off the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import row_file
import torch
from attention_shapes import Shape, low_rank
from bench_attention import error, machine
from turns import Wait, in_turns

from flashbias_convert.attention import PreparedBias, flashbias_attention, launch
from flashbias_convert.attention.hopper import rules

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
SCORES = 2**31
MOST_ENTRIES = 64
LENGTHS = (512, 1024, 1500, 2048, 3072, 4096, 8192, 16384)
FIELDS = ("dtype", "d", "columns", "n", "entries", "hopper_ms", "usual_ms", "gain",
          "hopper_error", "usual_error", "card", "torch", "triton")  # fmt: skip


@contextmanager
def kernels(hopper: bool) -> Iterator[None]:
    """Inside, calls of every length go to the kernel for Hopper, or none does."""
    shortest = dict.fromkeys(rules.SHORTEST, 1 if hopper else 2**31)
    with (
        mock.patch.object(launch, "_PLANS", {}),
        mock.patch.object(rules, "SHORTEST", shortest),
        mock.patch.object(rules, "FEWEST_SCORES", 1),
        mock.patch.object(rules, "FP16_FROM", min(rules.COLUMNS)),
    ):
        yield


def measure(dtype: str, d: int, columns: int, output: Path, wait: Wait) -> None:
    """All lengths of a kind of call; appends rows."""
    import triton

    found = []
    for n in LENGTHS:
        entries = max(1, min(MOST_ENTRIES, SCORES // n**2))
        heads = min(8, entries)
        bias = low_rank(columns) if columns else None
        shape = Shape((entries // heads,), heads, n, d, bias)
        torch.manual_seed(0)
        q, k, v = shape.inputs(getattr(torch, dtype), DEVICE)
        added = None if shape.bias is None else PreparedBias(shape.bias(shape, DEVICE))
        terms = None if added is None else added.bias
        calls = {}
        for name in ("hopper", "usual"):
            with kernels(name == "hopper"):
                out = flashbias_attention(q, k, v, added, backend="triton")
                calls[name] = error(out, shape, q, k, v, terms)
        found.append((n, entries, (q, k, v, added), calls))
    wait()
    for n, entries, (q, k, v, added), errors in found:
        row = {"dtype": dtype, "d": d, "columns": columns, "n": n, "entries": entries}
        times = {}
        for name in ("hopper", "usual"):
            with kernels(name == "hopper"):
                call = lambda a=q, b=k, c=v, x=added: flashbias_attention(  # noqa: E731
                    a, b, c, x, backend="triton"
                )
                call()
                with torch.cuda.stream(torch.cuda.Stream()):
                    times[name] = triton.testing.do_bench_cudagraph(
                        call, rep=40, return_mode="median"
                    )
            row[f"{name}_ms"] = f"{times[name]:.4f}"
            row[f"{name}_error"] = f"{errors[name]:.1e}"
        row |= {"gain": f"{times['usual'] / times['hopper']:.3f}", **machine()}
        row_file.append(output, FIELDS, row)
        print(*[row[name] for name in FIELDS[:10]], flush=True)


def main() -> None:
    """Measure what has no rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-sizes", type=int, nargs="*", default=list(rules.COLUMNS))
    parser.add_argument("--columns", type=int, nargs="*", default=[0, 16, 32, 64, 128])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16"])
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/tune_hopper.csv")
    options = parser.parse_args()
    if not rules.is_there(DEVICE):
        parser.error("this needs a Hopper card, and a version of Triton that rules.py names")
    row_file.begin(options.output, FIELDS, resume=options.resume)
    known = {(r["dtype"], r["d"], r["columns"]) for r in row_file.read(options.output)}
    calls = [
        (dtype, d, columns, options.output)
        for dtype in options.dtypes
        for d in options.head_sizes
        for columns in options.columns
        if columns in rules.COLUMNS[d] and (dtype, str(d), str(columns)) not in known
    ]
    for dtype, d, columns, _ in in_turns(measure, calls):
        print(f"no rows of {dtype}, heads of {d}, {columns} columns: its process died")


if __name__ == "__main__":
    main()
