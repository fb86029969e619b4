"""Time and memory of attention with a bias against the number of tokens.

python scripts/bench_lengths.py [--series NAME ...] [--lengths 256 1024 ...] [--kernel FILE.py]
                                [--output FILE.csv]

Forward, bf16, with the peers of `bench_attention.py`; by default one sequence, 8 heads of 64, a
bias of rank 16. Memory is everything beyond q, k and v: the bias in the form that the peer
takes, and what a call allocates, its result included. A peer for which the card has not enough
memory, that crashes, or whose result is wrong is marked so, and no line passes there; one that
lacks memory beside other commands (`beside.py`) has no row, unless the whole card is too small.
Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import row_file
import torch
from attention_peers import peers
from attention_shapes import Shape, alibi, low_rank
from bench_attention import (
    CRASHED,
    DEVICE,
    OUT_OF_MEMORY,
    machine,
    ready,
    require_card,
    timed,
)
from failures import LACKED
from given_kernel import GivenKernel
from torch import Tensor
from turns import Wait, in_turns

from flashbias_convert import ScoreBias
from flashbias_convert.benchmark.calls import AttentionCall

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = tuple(2**n for n in range(8, 17))
FIELDS = (
    "series", "n", "peer", "has_bias", "median_ms", "p20_ms", "p80_ms", "call_ms", "memory_mib",
    "error", "state", "card", "torch", "triton",
)  # fmt: skip
#: a dense bias of more entries is a process's own: FlexAttention counts them in 32 bits
LONG = 2**31
#: processes that get ready at a time
TOGETHER = 8
COLOURS = {
    "ours": "black",
    "ours, sdpa path": "#7b4fa3",
    "flash, no bias": "#bbbbbb",
    "cudnn, no bias": "#888888",
    "efficient, dense": "#f2b134",
    "cudnn, dense": "#ed553b",
    "flex, dense": "#3caea3",
    "flex, closed form": "#1f6f8b",
}
#: where a peer has no number, by its state; "+" stands for all others
MARKS = {OUT_OF_MEMORY: "x", "wrong": "$w$"}
#: of a kernel that the user gives
GIVEN_COLOUR = "#d977c5"


@dataclass(frozen=True)
class Series:
    """Calls that differ in their length alone.

    Attributes:
        title: above its pictures.
        batch, heads, d: sizes of q, k and v (batch, heads, n, d).
        bias: makes the terms, see `attention_shapes`.
        causal: each query sees the keys up to its own.
        without: peers that are left out.
    """

    title: str
    batch: int
    heads: int
    d: int
    bias: Callable[[Shape, torch.device], ScoreBias]
    causal: bool = False
    without: tuple[str, ...] = ()

    def shape(self, n: int) -> Shape:
        """The call of a length."""
        options: dict[str, Any] = {"causal": True} if self.causal else {}
        return Shape((self.batch,), self.heads, n, self.d, self.bias, options)

    def names(self, kernel: str | None) -> list[str]:
        """All peers, that of a kernel from a file included, which is never causal."""
        known = [name for name in COLOURS if name not in self.without]
        return known if kernel is None or self.causal else [*known, kernel]


_LOW_RANK_ALONE = ("flex, closed form",)
_PATH = ("ours, sdpa path",)
SERIES = {
    "plain": Series("8 heads of 64, rank 16", 1, 8, 64, low_rank(16), without=_LOW_RANK_ALONE),
    "heads of 16": Series(
        "8 heads of 16, rank 8", 1, 8, 16, low_rank(8), without=(*_LOW_RANK_ALONE, *_PATH)
    ),
    "non-causal": Series(
        "batch 2, 4 heads of 32, rank 8", 2, 4, 32, low_rank(8),
        without=(*_LOW_RANK_ALONE, *_PATH),
    ),
    "causal": Series(
        "50 heads of 32, causal, ALiBi", 1, 50, 32, alibi, causal=True, without=_PATH
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What one process measures; pickle takes it.

    Attributes:
        series: its name.
        n: the length.
        names: of peers.
        kernel: file of a kernel.
        output: takes the rows.
        long: needs memory that others must not hold meanwhile.
    """

    series: str
    n: int
    names: tuple[str, ...]
    kernel: Path | None
    output: Path
    long: bool = False


def dense(call: AttentionCall, *, with_causal: bool = True) -> Tensor:
    """(H, N, M) in bf16, made head by head: only the result has to fit."""
    heads, n, m = call.q.shape[-3], call.q.shape[-2], call.k.shape[-2]
    out = torch.empty(heads, n, m, dtype=call.q.dtype, device=call.q.device)
    for h in range(heads):
        own = call.bias.select_heads([h]).dense(n, m)[0]
        if call.args.causal:  # keys that no query of theirs sees take no part in its rounding
            own = own.masked_fill_(_later(n, m, own.device), -torch.inf)
            own -= own.amax(-1, keepdim=True)
            own = own if with_causal else own.masked_fill_(_later(n, m, own.device), 0.0)
        out[h] = own
    return out


def _later(n: int, m: int, device: torch.device) -> Tensor:
    """Keys behind a query, (N, M)."""
    return torch.ones(n, m, dtype=torch.bool, device=device).triu(m - n + 1)


def bench_length(job: Measured, wait: Wait) -> None:
    """The peers of a process, which get ready beside others but for long ones; appends rows."""
    if job.long:
        wait()
    shape = SERIES[job.series].shape(job.n)
    kernel = None if job.kernel is None else GivenKernel.of(job.kernel)
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.bfloat16, DEVICE)
    one = torch.ones(8, 8, dtype=torch.float64, device=DEVICE)
    torch.mm(one, one)  # allocates the workspace of cuBLAS, which is no business of a peer
    before = torch.cuda.memory_allocated()
    assert shape.bias is not None
    bias = shape.bias(shape, DEVICE)
    factors = (torch.cuda.memory_allocated() - before) / 2**20
    named = [p for p in peers(shape, q, k, v, bias, kernel, dense=dense) if p.name in job.names]
    found = [ready(peer, shape, q, k, v, bias) for peer in named]
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    if not job.long:
        wait()
    for seen, call in found:
        told = {"series": job.series, "n": job.n, **timed(seen, call), **machine()}
        held, peak = told.pop("held_mib", None), told.pop("peak_mib", None)
        if held is not None and peak is not None:
            own = factors if "ours" in told["peer"] else 0.0
            told["memory_mib"] = f"{float(peak) + float(held) + own:.2f}"
        if told["state"] != LACKED:
            row_file.append(job.output, FIELDS, told)
        shown = [told.get(x, "-") for x in ("median_ms", "memory_mib", "error")]
        print(f"{job.series} {job.n:6d} {told['peer']:20s}", *shown, told["state"], flush=True)


def note_lost(job: Measured) -> None:
    """Rows for peers whose process died, most often of an illegal access of theirs."""
    known = _known(job.output)
    for name in job.names:
        if (job.series, job.n, name) not in known:
            row = {"series": job.series, "n": job.n, "peer": name, "state": CRASHED, **machine()}
            row_file.append(job.output, FIELDS, row)


def _known(output: Path) -> set[tuple[str, int, str]]:
    """Series, lengths and peers that have a row."""
    return {(row["series"], int(row["n"]), row["peer"]) for row in row_file.read(output)}


def jobs(
    series: Sequence[str], lengths: Sequence[int], kernel: Path | None, output: Path
) -> list[Measured]:
    """What is measured by one process each: peers with long dense biases are on their own, at last.

    Peers that have a row are left out.
    """
    found: list[Measured] = []
    known = _known(output)
    given = None if kernel is None else GivenKernel.of(kernel).name
    for name in series:
        for n in lengths:
            left = [x for x in SERIES[name].names(given) if (name, n, x) not in known]
            long = SERIES[name].heads * n * n > LONG
            alone = [x for x in left if "dense" in x and long]
            together = tuple(x for x in left if x not in alone)
            if together:
                found.append(Measured(name, n, together, kernel, output))
            found += [Measured(name, n, (x,), kernel, output, long=True) for x in alone]
    return sorted(found, key=lambda job: job.long)


def draw(file: Path) -> None:
    """Write FILE.png beside FILE.csv: time and memory, a line of pictures for each series."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = row_file.read(file)
    series = list(dict.fromkeys(row["series"] for row in rows))
    size = (11, 0.4 + 4.2 * len(series))
    figure, grid = plt.subplots(len(series), 2, figsize=size, layout="constrained", squeeze=False)
    for name, (left, right) in zip(series, grid, strict=True):
        own = [row for row in rows if row["series"] == name]
        for axes, column in ((left, "median_ms"), (right, "memory_mib")):
            _draw_column(axes, own, column)
        left.set_ylabel("time of a call (ms)")
        right.set_ylabel("memory beside q, k, v (MiB)")
        left.set_title(SERIES[name].title, fontsize=10)
        left.legend(fontsize=8)
    states = {r["state"] for r in rows}
    note = "; x: out of memory" if OUT_OF_MEMORY in states else ""
    note += "; w: wrong" if "wrong" in states else ""
    note += "; +: failed" if states - {"ok", *MARKS} else ""
    figure.suptitle(f"attention with a bias, forward, bf16, {rows[0]['card']}{note}")
    figure.savefig(file.with_suffix(".png"), dpi=130)


def _draw_column(axes: Any, rows: Sequence[row_file.Row], column: str) -> None:
    """The lines of all peers, and marks where they have no number of a correct result."""
    names = list(dict.fromkeys(row["peer"] for row in rows))
    order = [*(x for x in COLOURS if x in names), *(x for x in names if x not in COLOURS)]
    for place, peer in enumerate(order):
        own = [r for r in rows if r["peer"] == peer]
        colour = COLOURS.get(peer, GIVEN_COLOUR)
        style = {"color": colour, "label": peer, "marker": "o", "markersize": 3.5}
        found = sorted((int(r["n"]), _number(r, column)) for r in own)  # NaN breaks the line
        width = 2.2 if peer == "ours" else 1.2
        axes.plot(*zip(*found, strict=True), linewidth=width, **style)
        for r in own:
            if r["state"] != "ok":  # at the top of the picture, below each other
                mark = MARKS.get(r["state"], "+")
                axes.plot(int(r["n"]), 0.97 - 0.04 * place, marker=mark, color=colour, markersize=8,
                          transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.3)


def _number(row: row_file.Row, column: str) -> float:
    return float(row[column]) if row["state"] == "ok" else math.nan


def measure(
    series: Sequence[str], lengths: Sequence[int], kernel: Path | None, output: Path, resume: bool
) -> None:
    """Measure what has no row, and draw all."""
    require_card(DEVICE)
    row_file.begin(output, FIELDS, resume=resume)
    wanted = jobs(series, lengths, kernel, output)
    for long in (False, True):
        calls = [(job,) for job in wanted if job.long is long]
        for (job,) in in_turns(bench_length, calls, together=TOGETHER):
            note_lost(job)
    draw(output)


def parsed(description: str, series: Sequence[str], lengths: Sequence[int], output: Path
           ) -> argparse.Namespace:  # fmt: skip
    """The words of a command, with these as what is measured and written if they do not say."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--series", nargs="*", choices=list(SERIES), default=list(series))
    parser.add_argument("--lengths", type=int, nargs="*", default=list(lengths))
    parser.add_argument("--kernel", type=Path, help="a Python file, see given_kernel.py")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--output", type=Path, default=output)
    return parser.parse_args()


def main() -> None:
    """Measure every length; print and write a table and a picture."""
    results = ROOT / "scripts/results"
    options = parsed(__doc__.splitlines()[0], ("plain",), LENGTHS, results / "bench_lengths.csv")
    measure(options.series, options.lengths, options.kernel, options.output, options.resume)


if __name__ == "__main__":
    main()
