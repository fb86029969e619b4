"""Time one Pairformer block, component by component, with each way to attend.

python scripts/paper/pairformer.py [--device cuda] [--output DIR] [--tiny] [--no-compile]

The sizes of the FlashBias paper: 128 pair channels, 4 heads of 32, N = 256 to 2,048 tokens;
inference, and training on a crop of 384. Weights are random; the pair representation is made of
distances along a random chain, so that its biases are smooth in parts, as in a protein, but ranks
and errors of factors say nothing about trained weights.

Ways: `library` makes the scores as OpenFold's classes do, in chunks of rows; SDPA, FlexAttention
and cuEquivariance (where it can be imported) get the dense bias; `ours, dense` is exact; `ours,
SVD in each call` makes factors of the rank anew, `ours, factors kept` does not, and `ours,
networks` is not trained. Errors are relative (Frobenius), of the attention's output on a few rows
against float64. Triangles project their bias with kept factors, too. A diffusion step attends with
five samples of one structure, 16 heads of 48; what is made once per structure is in the column
once_ms, and 200 steps take once_ms + 200 ms.

Writes pairformer.csv, row by row, and pairformer.png.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pairformer_block import (
    AttentionPairBias,
    Pairformer,
    TriangleAttention,
    Way,
    exact_ways,
    factors,
    kept,
    networks,
)
from torch import Tensor, nn

from flashbias_convert.benchmark.timing import allocated, measure

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "n", "mode", "component", "way", "rank", "ms", "p20_ms", "p80_ms", "once_ms", "peak_mib",
    "error", "status", "dtype", "device", "torch",
)  # fmt: skip
SIZES, RANKS, CROP, DIFFUSION = (256, 384, 768, 1218, 2048), (16, 32, 64, 96), 384, 768
SAMPLES, CHECKED_ROWS = 5, 4


def protein(n: int, channels: int, single: int, device: str, dtype: torch.dtype) -> Any:
    """Single and pair representation of a random chain, (1, N, C) and (N, N, C')."""
    draw = torch.Generator().manual_seed(0)
    places = torch.randn(n, 3, generator=draw).cumsum(0)
    distance = torch.cdist(places, places)
    near = (-(distance[..., None] - torch.linspace(0, 30, 16)).square() / 8).exp()
    tokens = torch.randn(n, 8, generator=draw)
    mix, own = (torch.randn(k, channels, generator=draw) for k in (16, 8))
    z = near @ mix + (tokens @ own)[:, None] - (tokens @ own.flip(0))[None]
    s = tokens @ torch.randn(8, single, generator=draw)
    return s[None].to(device, dtype), z.to(device, dtype)


class Table:
    """Rows as they come: printed, written, kept."""

    def __init__(
        self, file: Any, device: str, dtype: torch.dtype, repeats: int, ways: dict[str, Way]
    ) -> None:
        self.ways = ways
        self._writer = csv.writer(file)
        self._file, self.rows = file, list[dict[str, Any]]()
        self.device, self.repeats = torch.device(device), repeats
        cuda = self.device.type == "cuda"
        card = torch.cuda.get_device_name(device) if cuda else "CPU"
        self._where = {"dtype": str(dtype)[6:], "device": card, "torch": torch.__version__}
        self._writer.writerow(COLUMNS)

    def time(
        self,
        call: Callable[[], Any],
        error: Callable[[], float] | None = None,
        **facts: Any,
    ) -> None:
        """Add a row; what fails says why."""
        row: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), **self._where, **facts}
        try:
            found = measure(
                call, self.device, repeats=self.repeats, before=allocated(self.device), budget_s=20
            )
            row |= {
                "ms": f"{found.times.median_ms:.4f}",
                "p20_ms": f"{found.times.p20_ms:.4f}",
                "p80_ms": f"{found.times.p80_ms:.4f}",
                "peak_mib": "" if found.peak_mib is None else f"{found.peak_mib:.0f}",
            }
            row["error"] = "" if error is None else f"{error():.3g}"
            row["status"] = "ok"
        except Exception as problem:  # one peer that cannot must not stop the others
            row["status"] = f"failed: {type(problem).__name__}: {str(problem).splitlines()[:1]}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.rows.append(row)
        self._writer.writerow([row[name] for name in COLUMNS])
        self._file.flush()
        print(*(row[name] for name in COLUMNS[:12]), flush=True)


def made_once(way: Callable[[], Way], device: torch.device) -> tuple[Way, float]:
    """A way, and the milliseconds that it takes to make it, the second time."""
    spent = 0.0
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        made = way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent = 1e3 * (time.perf_counter() - start)
    return made, spent


def relative_error(way: Way, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> float:
    """Of the output on the first rows, against float64."""
    q, k, v = (x[:CHECKED_ROWS] for x in (q, k, v))
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    scores += bias.double()
    truth = scores.softmax(-1) @ v.double()
    return float((way(q, k, v, bias).double() - truth).norm() / truth.norm())


def ways_for(table: Table, bias: Tensor, z: Tensor, ranks: Any) -> Iterator[Any]:
    """(name, rank, way, once_ms, whether its error says something)."""
    for name, way in table.ways.items():
        yield name, "", way, "", True
    for rank in (r for r in ranks if r <= bias.shape[-1]):
        yield "ours, SVD in each call", rank, factors(rank), "", True
        way, spent = made_once(lambda rank=rank: kept(bias, rank), table.device)
        yield "ours, factors kept", rank, way, f"{spent:.3f}", True
        yield "ours, networks", rank, networks(z, len(bias), rank), "", False


def triangles(table: Table, module: TriangleAttention, z: Tensor, ranks: Any, **facts: Any) -> None:
    """Triangle attention, once for each way."""
    q, k, v, bias = module.inputs(z)[1:]
    for name, rank, way, once, tells in ways_for(table, bias, z, ranks):
        error = (lambda w=way: relative_error(w, q, k, v, bias)) if tells else None
        table.time(lambda w=way: module(z, w), error, way=name, rank=rank, once_ms=once, **facts)


@torch.no_grad()
def inference(table: Table, block: Pairformer, s: Tensor, z: Tensor, ranks: Any) -> None:
    """Every component once, the attention once per way, and the whole block."""
    facts = {"n": len(z), "mode": "inference"}
    others: dict[str, tuple[nn.Module, Tensor]] = {
        "triangle multiplication, outgoing": (block.outgoing, z),
        "triangle multiplication, incoming": (block.incoming, z),
        "pair transition": (block.pair_transition, z),
        "single transition": (block.single_transition, s),
    }
    for name, (module, x) in others.items():
        table.time(lambda m=module, x=x: m(x), component=name, **facts)
    for name, module in (("starting", block.starting), ("ending", block.ending)):
        triangles(table, module, z, ranks, component=f"triangle attention, {name}", **facts)
    for name, way in table.ways.items():
        if name != "cuEquivariance":  # it attends in triangles
            table.time(lambda w=way: block.attention(s, z, w), component="attention with pair bias",
                       way=name, **facts)  # fmt: skip
            table.time(lambda w=way: block(s, z, w), component="block", way=name, **facts)


def training(table: Table, block: Pairformer, s: Tensor, z: Tensor) -> None:
    """Forward and backward of a triangle attention and of the whole block."""
    z = z.requires_grad_()
    calls = {"triangle attention, starting": lambda w: block.starting(z, w).sum(),
             "block": lambda w: block(s, z, w)}  # fmt: skip

    def step(call: Callable[[Way], Tensor], way: Way) -> None:
        block.zero_grad(set_to_none=True)
        z.grad = None
        call(way).backward()

    for name, call in calls.items():
        for way_name, way in table.ways.items():
            if name == "block" and way_name == "cuEquivariance":
                continue
            table.time(lambda c=call, w=way: step(c, w), component=name, way=way_name,
                       n=len(z), mode="training")  # fmt: skip


@torch.no_grad()
def diffusion(table: Table, z: Tensor, ranks: Any, heads: int, width: int) -> None:
    """One denoising step's attention with pair bias; only what changes from step to step."""
    torch.manual_seed(1)
    module = AttentionPairBias(width, z.shape[-1], heads).to(z.device, z.dtype)
    s = torch.randn(SAMPLES, len(z), width, device=z.device, dtype=z.dtype)
    bias = module.bias(z)
    q, k, v = module.queries(module.norm(s))
    facts: dict[str, Any] = {"n": len(z), "mode": "inference", "component": "diffusion step"}
    for name, way in table.ways.items():
        if name == "cuEquivariance":
            continue
        error = lambda w=way: relative_error(w, q, k, v, bias)  # noqa: E731
        table.time(lambda w=way: module(s, z, w), error, way=f"{name}, bias in each step", **facts)
        table.time(lambda w=way: module(s, z, w, bias), error, way=f"{name}, bias kept", **facts)
    for rank in (r for r in ranks if r <= len(z)):
        way, spent = made_once(lambda rank=rank: kept(bias, rank), table.device)
        error = lambda w=way: relative_error(w, q, k, v, bias)  # noqa: E731
        own = {"way": "ours, factors kept", "rank": rank, "once_ms": f"{spent:.3f}"}
        table.time(lambda w=way: module(s, z, w, bias), error, **own, **facts)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Triangle attention by N, and the error of factors by their rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    good = [r for r in rows if r["status"] == "ok" and r["mode"] == "inference"]
    triangles = [r for r in good if r["component"] == "triangle attention, starting"]
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in triangles:
        label = f"{row['way']}, rank {row['rank']}" if row["rank"] else row["way"]
        lines.setdefault(label, []).append((row["n"], float(row["ms"])))
    for label, points in lines.items():
        left.plot(*zip(*points, strict=True), marker="o", label=label)
    left.set(xscale="log", yscale="log", xlabel="N", ylabel="ms", title="triangle attention")
    left.legend(fontsize=6)
    for n in sorted({r["n"] for r in triangles}):
        points = [(r["rank"], float(r["error"])) for r in triangles
                  if r["n"] == n and r["way"] == "ours, factors kept"]  # fmt: skip
        if points:
            right.plot(*zip(*points, strict=True), marker="o", label=f"N = {n}")
    right.set(yscale="log", xlabel="rank", ylabel="relative error of the output, random weights")
    right.legend(fontsize=8)
    figure.suptitle(f"{rows[0]['device']}, {rows[0]['dtype']}, torch {rows[0]['torch']}")
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    parser.add_argument("--no-compile", action="store_true", help="leave out FlexAttention")
    parser.add_argument("--tiny", action="store_true", help="a block that a CPU runs in seconds")
    return parser.parse_args()


def main() -> None:
    """Print and write a row per size, component and way, and draw."""
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, args.dtype)
    pair, heads, single, single_heads = (16, 2, 32, 2) if args.tiny else (128, 4, 384, 16)
    sizes, ranks, repeats = tuple(args.sizes), tuple(args.ranks), args.repeats
    crop, steps_at, width = CROP, DIFFUSION, 2 * single
    if args.tiny:
        sizes, ranks, repeats, crop, steps_at = (12, 17), (2,), 1, 12, 12
    torch.manual_seed(0)
    block = Pairformer(pair, heads, single, single_heads).to(args.device, dtype)
    with (args.output / "pairformer.csv").open("w", newline="") as file:
        table = Table(file, args.device, dtype, repeats, exact_ways(not args.no_compile))
        for n in sizes:
            torch.compiler.reset()  # shapes add up, and past a limit nothing would be compiled
            inference(table, block, *protein(n, pair, single, args.device, dtype), ranks)
        torch.compiler.reset()
        diffusion(table, protein(steps_at, pair, single, args.device, dtype)[1], ranks,
                  single_heads, width)  # fmt: skip
        torch.compiler.reset()
        training(table, block, *protein(crop, pair, single, args.device, dtype))
    draw(table.rows, args.output / "pairformer.png")


if __name__ == "__main__":
    main()
