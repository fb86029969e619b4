"""From which length on the kernel for Hopper is faster than the usual one, by head size and bias.

python scripts/tune_hopper.py [--head-sizes 64 128] [--kinds plain causal ...] [--resume]
                              [--output FILE.csv]

About 2^31 scores a call, at most 64 heads times batch entries, by CUDA graph; both results are
compared with float64 on a slice. Calls by themselves are timed on the host alone, which describes
tensors to the card for the kernel for Hopper. `attention/hopper/rules.py` has what was read off
the table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import row_file
import torch
from attention_shapes import Shape, alibi, key_bias, low_rank, offsets
from bench_attention import error, machine
from turns import Wait, in_turns

from flashbias_convert import ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention, launch
from flashbias_convert.attention.hopper import rules

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
SCORES = 2**31
MOST_ENTRIES = 64
LENGTHS = (512, 1024, 1500, 2048, 4096, 8192, 16384)
#: calls whose time on the host is taken
CALLS = 40
FIELDS = ("kind", "dtype", "d", "columns", "n", "entries", "hopper_ms", "usual_ms", "gain",
          "hopper_error", "usual_error", "hopper_host_us", "usual_host_us", "card", "torch",
          "triton")  # fmt: skip


#: kind: its bias, and whether keys after a query are hidden
KINDS: dict[str, tuple[Callable[[Shape, torch.device], ScoreBias] | None, bool]] = {
    "plain": (None, False),
    "causal": (None, True),
    "alibi": (alibi, True),
    "key bias": (key_bias, False),
    "distances": (offsets, False),
    "causal distances": (offsets, True),
}


@contextmanager
def kernels(hopper: bool) -> Iterator[None]:
    """Inside, calls of every length go to the kernel for Hopper, or none does."""
    shortest = dict.fromkeys(rules.SHORTEST, 1 if hopper else 2**31)
    with (
        mock.patch.object(launch, "_PLANS", {}),
        mock.patch.object(rules, "SHORTEST", shortest),
        mock.patch.object(rules, "FEWEST_SCORES", 1),
        mock.patch.object(rules, "FEWEST_OF_ONE_PASS", 1),
        mock.patch.object(rules, "FP16", frozenset(rules.SHORTEST)),
    ):
        yield


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds that the host takes for a call whose work it does not wait for."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return took / CALLS * 1e6


def measure(kind: str, dtype: str, d: int, columns: int, output: Path, wait: Wait) -> None:
    """All lengths of a kind of call; appends rows."""
    import triton

    found = []
    own, causal = KINDS[kind]
    for n in LENGTHS:
        entries = max(1, min(MOST_ENTRIES, SCORES // n**2))
        heads = min(8, entries)
        bias = low_rank(columns) if columns else own
        shape = Shape((entries // heads,), heads, n, d, bias, {"causal": causal})
        torch.manual_seed(0)
        q, k, v = shape.inputs(getattr(torch, dtype), DEVICE)
        added = None if shape.bias is None else PreparedBias(shape.bias(shape, DEVICE))
        terms = None if added is None else added.bias
        calls = {}
        for name in ("hopper", "usual"):
            with kernels(name == "hopper"):
                out = flashbias_attention(q, k, v, added, causal=causal, backend="triton")
                calls[name] = error(out, shape, q, k, v, terms)
        found.append((n, entries, (q, k, v, added), calls))
    wait()
    for n, entries, (q, k, v, added), errors in found:
        row = {"kind": kind, "dtype": dtype, "d": d, "columns": columns, "n": n, "entries": entries}
        times = {}
        for name in ("hopper", "usual"):
            with kernels(name == "hopper"):
                call = lambda a=q, b=k, c=v, x=added: flashbias_attention(  # noqa: E731
                    a, b, c, x, causal=causal, backend="triton"
                )
                call()
                row[f"{name}_host_us"] = f"{host_us(call):.1f}"
                with torch.cuda.stream(torch.cuda.Stream()):
                    times[name] = triton.testing.do_bench_cudagraph(
                        call, rep=20, return_mode="median"
                    )
            row[f"{name}_ms"] = f"{times[name]:.4f}"
            row[f"{name}_error"] = f"{errors[name]:.1e}"
        row |= {"gain": f"{times['usual'] / times['hopper']:.3f}", **machine()}
        row_file.append(output, FIELDS, row)
        print(*[row[name] for name in FIELDS[:13]], flush=True)


def knows(kind: str, dtype: str, d: int, columns: int) -> bool:
    """Whether the kernel for Hopper has a form for such calls."""
    if columns not in rules.COLUMNS[d] or (columns and KINDS[kind][0] is not None):
        return False
    return d == 64 or "distances" not in kind


def main() -> None:
    """Measure what has no rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-sizes", type=int, nargs="*", default=list(rules.COLUMNS))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--columns", type=int, nargs="*", default=[0, 16, 32, 64, 128])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16"])
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/tune_hopper.csv")
    options = parser.parse_args()
    if not rules.is_there(DEVICE):
        parser.error("this needs a Hopper card, and a version of Triton that rules.py names")
    row_file.begin(options.output, FIELDS, resume=options.resume)
    known = {(r["kind"], r["dtype"], r["d"], r["columns"]) for r in row_file.read(options.output)}
    calls = [
        (kind, dtype, d, columns, options.output)
        for kind in options.kinds
        for dtype in options.dtypes
        for d in options.head_sizes
        for columns in options.columns
        if (kind, dtype, str(d), str(columns)) not in known and knows(kind, dtype, d, columns)
    ]
    for kind, dtype, d, columns, _ in in_turns(measure, calls):
        print(f"no rows of {kind}, {dtype}, heads of {d}, {columns} columns: its process died")


if __name__ == "__main__":
    main()
