"""Does a kernel for a sparse part beside low-rank factors pay? Time and error of its rivals.

python scripts/bench_sparse.py [--lengths 4096 16384] [--output FILE.csv] [--stop-s S] [--resume]

A bias like gravity, 1 / (distance^2 + 0.01) over points of the unit square, times a factor for each
of 8 heads of 64; its smooth part has factors of rank 32, and the nearest neighbours of each point
keep their values exactly. Ways: torch's attention and our kernel with the dense bias; our look-up
of the quantised distance; factors alone; and factors with the exact cells, carried by a look-up or
added afterwards in closed form (`sparse_correction.py`), in torch or by a kernel of its own, for
which the main pass has to give the log-sum-exp: it is our forward kernel for training.

`error` is relative to float64 with the exact bias, on some queries; `own_error` to float64 with the
bias that the way means, which is rounding alone. `median_ms` is time on the card (CUDA graph
replays), `call_ms` that of eager calls. Prints whether the kernel pays; writes a table, row by row,
and a picture.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_attention import measure as measure_on_card
from sparse_correction import Cells, corrected, corrected_by_kernel
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbias_convert import Dense, Lookup, LowRank, ScoreBias, flashbias_attention
from flashbias_convert.attention import PreparedBias
from flashbias_convert.attention.autograd import attention_training_op
from flashbias_convert.benchmark.timing import measure as measure_on_clock
from flashbias_convert.decompose.randomised import quick_factors

ROOT = Path(__file__).resolve().parent.parent
FIELDS = (
    "n", "way", "kept", "rank", "median_ms", "call_ms", "peak_mib", "held_mib", "error",
    "own_error", "state", "card", "torch",
)  # fmt: skip
#: the bias at distance 0 is 100 times this in the strongest head, and half of that in the weakest
STRENGTH = 0.08
#: distances are quantised to so many values
BINS = 4096
#: times that factors are found anew beside the cells that need none
PASSES = 3
QUERIES = 64
BACKENDS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
TORCH, KERNEL = "factors + cells, torch", "factors + cells, kernel"
#: what the kernel has to beat
RIVALS = ("SDPA efficient, dense", "SDPA cudnn, dense", "ours, dense", "ours, look-up")


class Gravity:
    """Points, their bias, and q, k, v (1, H, N, D) that attend with it."""

    def __init__(self, n: int, heads: int, d: int, device: str, dtype: torch.dtype) -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.n, self.heads, self.device, self.dtype = n, heads, torch.device(device), dtype
        points = torch.rand(n, 2, generator=draw, device=device)
        order = (points[:, 0] * 16).floor() * 2 + points[:, 1]
        self.points = points[order.argsort()]  # neighbours are near in memory, too
        q, k, v = (torch.randn(1, heads, n, d, generator=draw, device=device) for _ in range(3))
        self.q, self.k, self.v = q.to(dtype), k.to(dtype), v.to(dtype)
        self.strength = torch.linspace(0.5, 1, heads, device=device) * STRENGTH
        self.scale = d**-0.5
        self.rows = torch.linspace(0, n - 1, min(n, QUERIES), device=device).long()

    def matrix(self, rows: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Gravity of strength 1, (N or rows, N)."""
        x = self.points.to(dtype)
        squares = sum((own[:, None] - other[None]).square() for own, other in zip(
            (x if rows is None else x[rows]).T, x.T, strict=True))  # fmt: skip
        return 1 / (squares + 0.01)

    def dense(self) -> Tensor:
        """(H, N, N) in the dtype of q, made head by head."""
        made = torch.empty(self.heads, self.n, self.n, dtype=self.dtype, device=self.device)
        one = self.matrix()
        for head, strength in enumerate(self.strength.tolist()):
            made[head] = one * strength
        return made

    def truth(self, bias: Tensor | None = None) -> Tensor:
        """Float64, of some queries, with the exact bias or with one (H, rows, N) of one's own."""
        if bias is None:
            one = self.matrix(self.rows, torch.float64)
            bias = one * self.strength.double()[:, None, None]
        q, k, v = (x[0].double() for x in (self.q[:, :, self.rows], self.k, self.v))
        return (q @ k.mT * self.scale + bias).softmax(-1) @ v

    @functools.cache  # noqa: B019 - as long as the process needs it
    def parts(self, kept: int, rank: int) -> tuple[LowRank, Cells]:
        """Factors, and the cells of the nearest neighbours; rows lack their means."""
        one = self.matrix()
        one -= one.mean(-1, keepdim=True)
        index = one.topk(kept, -1).indices
        values = one.gather(-1, index)
        for _ in range(PASSES):
            found = quick_factors(one[None], rank)
            low = torch.stack([(found.phi_q[0] * found.phi_k[0][index[:, j]]).sum(-1)
                               for j in range(kept)], -1)  # fmt: skip
            one.scatter_(-1, index, low)
        strength = self.strength[:, None, None]
        term = LowRank(phi_q=found.phi_q * strength, phi_k=found.phi_k.expand(self.heads, -1, -1))
        return term, Cells(index.int().contiguous(), (low * strength).contiguous(),
                           ((values - low) * strength).contiguous())  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A call, ready, and the bias (H, rows, N) that it means, float64; None: the exact one."""

    call: Callable[[], Tensor]
    means: Tensor | None = None


def fused(case: Gravity, backend: SDPBackend, biased: bool) -> Way:
    mask = case.dense()[None] if biased else None

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(case.q, case.k, case.v, mask)

    return Way(call, None if biased else torch.zeros_like(case.q[0, :, :1, :1]).double())


def ours(case: Gravity, *terms: Any, means: Tensor | None = None) -> Way:
    bias = PreparedBias(ScoreBias(terms, case.heads)) if terms else None
    return Way(lambda: flashbias_attention(case.q, case.k, case.v, bias), means)


def look_up(case: Gravity) -> Way:
    """The distance, quantised so that every value is met equally often."""
    one = case.matrix()
    some = one.flatten()[:: max(1, one.numel() // 2**22)].sort().values
    edges = some[torch.linspace(0, len(some) - 1, BINS, device=one.device).long()]
    code = torch.bucketize(one, edges, out_int32=True).clamp_(max=BINS - 1)
    table = case.strength[:, None] * edges
    return ours(case, Lookup(table=table, code=code), means=table.double()[:, code[case.rows]])


def low_rank(case: Gravity, term: LowRank) -> Tensor:
    """What factors mean, on some rows: (H, rows, N)."""
    return term.phi_q.double()[:, case.rows] @ term.phi_k.double().mT


def with_cells(case: Gravity, term: LowRank, cells: Cells) -> Tensor:
    """The same with the exact cells."""
    at = cells.index[case.rows].long().expand(case.heads, -1, -1)
    return low_rank(case, term).scatter_add_(-1, at, cells.sparse.double()[:, case.rows])


def carried_by_look_up(case: Gravity, term: LowRank, cells: Cells) -> Way:
    """Code 0 for what is not kept, and a code of its own for each cell."""
    n, kept = cells.index.shape
    code = torch.zeros(n, n, dtype=torch.int32, device=case.device)
    own = torch.arange(1, n * kept + 1, dtype=torch.int32, device=case.device)
    code.scatter_(-1, cells.index.long(), own.reshape(n, kept))
    table = F.pad(cells.sparse.flatten(1), (1, 0))
    return ours(case, term, Lookup(table=table, code=code), means=with_cells(case, term, cells))


def main_pass(case: Gravity, term: LowRank) -> Callable[[], tuple[Tensor, Tensor]]:
    """Output (1, H, N, D) and log-sum-exp (1, H, N, 2); without a card by the formula."""
    if case.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":

        def formula() -> tuple[Tensor, Tensor]:
            scores = case.q.float() @ case.k.float().mT * case.scale
            scores = scores + term.phi_q.float() @ term.phi_k.float().mT
            top = scores.amax(-1, keepdim=True)
            share = 1 / (scores - top).exp().sum(-1, keepdim=True)
            out = (scores - top).exp() * share @ case.v.float()
            return out.to(case.dtype), torch.cat([top, share], -1)

        return formula
    half = case.dtype != torch.float32
    packed = PreparedBias(ScoreBias((term,), case.heads)).packed_for_training(half)
    return lambda: attention_training_op(
        case.q, case.k, case.v, packed.tensors, packed.spec, case.scale, None, None, 0, None,
        0,
    )  # fmt: skip


def added_afterwards(case: Gravity, term: LowRank, cells: Cells, correct: Any) -> Way:
    run = main_pass(case, term)

    def call() -> Tensor:
        made: Tensor = correct(case.q, case.k, case.v, *run(), cells, case.scale)
        return made

    return Way(call, with_cells(case, term, cells))


def ways(case: Gravity, kept: tuple[int, ...], rank: int) -> Iterator[tuple[str, Any, Any]]:
    """Name, cells kept per row, and what makes the way."""
    for name, backend in {"flash": SDPBackend.FLASH_ATTENTION, **BACKENDS}.items():
        if name != "efficient":
            yield f"SDPA {name}, no bias", "", functools.partial(fused, case, backend, False)
    yield "ours, dense", "", lambda: ours(case, Dense(bias=case.dense()))
    yield "ours, look-up", "", lambda: look_up(case)
    for count in (k for k in kept if k < case.n):

        def alone(count: int = count) -> Way:
            term, _ = case.parts(count, rank)
            return ours(case, term, means=low_rank(case, term))

        def first(count: int = count) -> Way:
            term, _ = case.parts(count, rank)
            run = main_pass(case, term)
            return Way(lambda: run()[0], low_rank(case, term))

        def after(correct: Any, count: int = count) -> Way:
            return added_afterwards(case, *case.parts(count, rank), correct)

        yield "factors alone", count, alone
        yield "factors alone, with log-sum-exp", count, first
        yield KERNEL, count, functools.partial(after, corrected_by_kernel)
        yield TORCH, count, functools.partial(after, corrected)
        yield (
            "factors + cells, look-up",
            count,
            lambda c=count: carried_by_look_up(case, *case.parts(c, rank)),
        )
    for name, backend in BACKENDS.items():
        yield f"SDPA {name}, dense", "", functools.partial(fused, case, backend, True)


def measured(case: Gravity, make: Callable[[], Way], repeats: int) -> dict[str, Any]:
    """Times, memory and errors of a way."""
    cuda = case.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    try:
        way = make()
        held = torch.cuda.memory_allocated() - before if cuda else 0
        out = way.call()[0][:, case.rows].double()
        truth = case.truth()
        own = truth if way.means is None else case.truth(way.means)
        errors = [float((out - x).norm() / x.norm()) for x in (truth, own)]
        if cuda:
            times = measure_on_card(way.call)
        else:
            found = measure_on_clock(way.call, case.device, repeats=repeats)
            times = {"median_ms": f"{found.times.median_ms:.4f}"}
    except Exception as problem:  # a way that fails is a row
        text = f"{type(problem).__name__}: {problem}".splitlines()[0][:120]
        return {"state": text}
    return {
        "held_mib": f"{held / 2**20:.1f}", "error": f"{errors[0]:.2e}",
        "own_error": f"{errors[1]:.2e}", "state": "ok", **{k: v for k, v in times.items()
                                                           if k in FIELDS},
    }  # fmt: skip


def told(rows: list[dict[str, str]]) -> Iterator[str]:
    """Whether the kernel pays, for each length and number of cells."""
    good = [row for row in rows if row["state"] == "ok"]
    for row in (r for r in good if r["way"] == KERNEL):
        same = [r for r in good if r["n"] == row["n"] and r["kept"] in ("", row["kept"])]
        found = {r["way"]: r for r in same}
        rivals = {name: float(found[name]["median_ms"]) for name in RIVALS if name in found}
        if not rivals:
            continue
        best, mine = min(rivals, key=lambda name: rivals[name]), float(row["median_ms"])
        ratio = rivals[best] / mine
        alone = found.get("factors alone")
        beside = f", {alone['error']} with factors alone" if alone else ""
        yield (
            f"N = {row['n']}, {row['kept']} cells a row: the kernel "
            f"{'pays' if ratio > 1 else 'does not pay'}: {mine:.3f} ms, {ratio:.2f} times as fast "
            f"as {best}; error {row['error']}{beside}"
        )


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Time and error of each way, a panel for each length."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    good = [row for row in rows if row["state"] == "ok"]
    lengths = sorted({int(row["n"]) for row in good})
    figure = Figure(figsize=(7.5 * max(1, len(lengths)), 5), layout="constrained")
    for at, n in enumerate(lengths):
        axes = figure.add_subplot(1, len(lengths), at + 1)
        own = [row for row in good if int(row["n"]) == n]
        axes.set_prop_cycle(color=colormaps["tab20"].colors)  # type: ignore[attr-defined]
        for name in dict.fromkeys(row["way"] for row in own):
            points = [(float(r["median_ms"]), float(r["error"])) for r in own if r["way"] == name]
            mark = "*" if name == KERNEL else "o" if name.startswith("factors") else "s"
            axes.plot(*zip(*points, strict=True), mark, linestyle="", label=name)
        axes.set(xscale="log", yscale="log", xlabel="ms", title=f"N = {n}")
        axes.set_ylabel("relative error, against float64 with the exact bias")
    if lengths:
        figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle(f"bias like gravity, heads of 64, {rows[0]['card']}, torch {rows[0]['torch']}")
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--kept", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--stop-s", type=float, default=0.0, help="begin no row after; 0: none")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--tiny", action="store_true", help="a size that a CPU runs in seconds")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_sparse.csv")
    return parser.parse_args()


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Measure every way at every length; print and write a table and a picture."""
    args, started = arguments(), time.monotonic()
    heads, d = (2, 16) if args.tiny else (8, 64)
    lengths, kept, rank = args.lengths, tuple(args.kept), args.rank
    if args.tiny:
        lengths, kept, rank = [70], (3,), 4
    cuda = args.device.startswith("cuda")
    where = {"card": torch.cuda.get_device_name(args.device) if cuda else "CPU",
             "torch": torch.__version__}  # fmt: skip
    if not (args.resume and args.output.exists()):
        with args.output.open("w", newline="") as file:
            csv.DictWriter(file, FIELDS).writeheader()
    known = {(row["n"], row["way"], row["kept"]) for row in read(args.output)}
    for n in lengths:
        case = Gravity(n, heads, d, args.device, getattr(torch, args.dtype))
        for name, count, make in ways(case, kept, rank):
            if (str(n), name, str(count)) in known:
                continue
            if args.stop_s and time.monotonic() - started > args.stop_s:
                print(f"stopped before {name} at N = {n}")
                break
            row = {"n": n, "way": name, "kept": count, "rank": rank if count else "", **where}
            row |= measured(case, make, 1 if args.tiny else 10)
            with args.output.open("a", newline="") as file:
                csv.DictWriter(file, FIELDS).writerow(row)
            shown = ("n", "way", "kept", "median_ms", "error", "own_error", "state")
            print(*(row.get(x, "") for x in shown), flush=True)
            if cuda:
                torch.cuda.empty_cache()
    rows = read(args.output)
    for sentence in told(rows):
        print(sentence)
    if rows:
        draw(rows, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
