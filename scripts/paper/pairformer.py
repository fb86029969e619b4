"""Time one Pairformer block, component by component, with each way to attend.

python scripts/paper/pairformer.py [--device cuda] [--output DIR] [--stop-s 500] [--resume]

The sizes of the FlashBias paper: 128 pair channels, 4 heads of 32, N = 256 to 2,048 tokens;
inference, and training on a crop of 384. Weights are random; the pair representation is made of
distances along a random chain, so that its biases are smooth in parts, as in a protein, but ranks
and errors of factors say nothing about trained weights.

Ways: `library` makes the scores as OpenFold's classes do, in chunks of rows; SDPA, FlexAttention
and cuEquivariance (where it can be imported) get the dense bias; `ours, dense` is exact; `ours, SVD
in each call` makes factors of the rank anew, `ours, factors kept` does not, and `ours, networks` is
not trained. Errors are relative (Frobenius), of the attention's output on a few rows against
float64. Triangles project their bias with kept factors, too. A diffusion step attends with five
samples of one structure, 16 heads of 48; what is made once per structure is in the column once_ms,
and steps_200_ms is what it and 200 steps take. Up to which rank factors are faster than the kept
bias is printed.

Writes pairformer.csv, row by row, and pairformer.png. What fails or takes longer than --limit-s is
a row with its reason; after --stop-s no row is begun; --resume keeps the rows of the file and adds
those that it lacks. --parts and --ways choose."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from pairformer_table import Stopped, Table, Trial, break_even
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
SIZES, RANKS, CROP, DIFFUSION = (256, 384, 768, 1218, 2048), (16, 32, 64, 96), 384, 768
STEP_RANKS = (8, 16, 32, 48, 64, 96, 128)
PARTS = ("diffusion", "training", "inference")
SAMPLES, CHECKED_ROWS = 5, 4
DENSE_KEPT = "ours, dense, bias kept"

Ways = dict[str, Way]


def protein(n: int, channels: int, single: int, device: str, dtype: torch.dtype) -> Any:
    """Single and pair representation of a random chain, (1, N, C) and (N, N, C')."""
    draw = torch.Generator().manual_seed(0)
    places = torch.randn(n, 3, generator=draw).cumsum(0).to(device)
    distance = torch.cdist(places, places)
    near = (-(distance[..., None] - torch.linspace(0, 30, 16, device=device)).square() / 8).exp()
    tokens = torch.randn(n, 8, generator=draw).to(device)
    mix, own = (torch.randn(k, channels, generator=draw).to(device) for k in (16, 8))
    z = near @ mix + (tokens @ own)[:, None] - (tokens @ own.flip(0))[None]
    s = tokens @ torch.randn(8, single, generator=draw).to(device)
    return s[None].to(dtype), z.to(dtype)


def made_once(way: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What is made, and the milliseconds that it takes to make it, the second time."""
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
    """Of the output of the first rows, against float64; all rows run, as what was compiled does."""
    out = way(q, k, v, bias)[:CHECKED_ROWS].double()
    q, k, v = (x[:CHECKED_ROWS] for x in (q, k, v))
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    scores += bias.double()
    truth = scores.softmax(-1) @ v.double()
    return float((out - truth).norm() / truth.norm())


def triangles(
    table: Table,
    ways: Ways,
    module: TriangleAttention,
    z: Tensor,
    ranks: Sequence[int],
    **facts: Any,
) -> None:
    """Triangle attention, once for each way."""
    q, k, v, bias = module.inputs(z)[1:]

    def trial(way: Way, once: float | None = None, tells: bool = True) -> Trial:
        error = (lambda: relative_error(way, q, k, v, bias)) if tells else None
        return Trial(lambda: module(z, way), error, once)

    for name, way in ways.items():
        table.time(partial(trial, way), way=name, **facts)
    for rank in (r for r in ranks if r <= len(z)):
        table.time(lambda r=rank: trial(factors(r)), way="ours, SVD in each call", rank=rank,
                   **facts)  # fmt: skip
        table.time(lambda r=rank: trial(*made_once(lambda: kept(bias, r), table.device)),
                   way="ours, factors kept", rank=rank, **facts)  # fmt: skip
        table.time(lambda r=rank: trial(networks(z, len(bias), r), tells=False),
                   way="ours, networks", rank=rank, **facts)  # fmt: skip


@torch.no_grad()
def inference(
    table: Table, ways: Ways, block: Pairformer, s: Tensor, z: Tensor, ranks: Sequence[int]
) -> None:
    """Every component once, the attention once per way, and the whole block."""
    facts = {"n": len(z), "mode": "inference"}
    others: dict[str, tuple[nn.Module, Tensor]] = {
        "triangle multiplication, outgoing": (block.outgoing, z),
        "triangle multiplication, incoming": (block.incoming, z),
        "pair transition": (block.pair_transition, z),
        "single transition": (block.single_transition, s),
    }
    for name, module in (("starting", block.starting), ("ending", block.ending)):
        component = f"triangle attention, {name}"
        triangles(table, ways, module, z, ranks, component=component, **facts)
    for name, (part, x) in others.items():
        table.time(lambda m=part, x=x: Trial(lambda: m(x)), component=name, **facts)
    for name, way in ways.items():
        if name != "cuEquivariance":  # it attends in triangles
            table.time(lambda w=way: Trial(lambda: block.attention(s, z, w)), way=name,
                       component="attention with pair bias", **facts)  # fmt: skip
            table.time(lambda w=way: Trial(lambda: block(s, z, w)), way=name, component="block",
                       **facts)  # fmt: skip


def training(table: Table, ways: Ways, block: Pairformer, s: Tensor, z: Tensor) -> None:
    """Forward and backward of a triangle attention and of the whole block."""
    z = z.requires_grad_()
    calls = {"triangle attention, starting": lambda w: block.starting(z, w).sum(),
             "block": lambda w: block(s, z, w)}  # fmt: skip

    def step(call: Callable[[Way], Tensor], way: Way) -> None:
        block.zero_grad(set_to_none=True)
        z.grad = None
        call(way).backward()

    for name, call in calls.items():
        for way_name, way in ways.items():
            if name == "block" and way_name == "cuEquivariance":
                continue
            table.time(lambda c=call, w=way: Trial(lambda: step(c, w)), component=name,
                       way=way_name, n=len(z), mode="training")  # fmt: skip


@torch.no_grad()
def diffusion(
    table: Table, ways: Ways, z: Tensor, ranks: Sequence[int], heads: int, width: int
) -> None:
    """One denoising step's attention with pair bias; only what changes from step to step."""
    torch.manual_seed(1)
    module = AttentionPairBias(width, z.shape[-1], heads).to(z.device, z.dtype)
    s = torch.randn(SAMPLES, len(z), width, device=z.device, dtype=z.dtype)
    bias, once = made_once(lambda: module.bias(z), table.device)
    q, k, v = module.queries(module.norm(s))
    facts: dict[str, Any] = {"n": len(z), "mode": "inference", "component": "diffusion step"}

    def trial(way: Way, own: Tensor | None, spent: float) -> Trial:
        error = lambda: relative_error(way, q, k, v, bias)  # noqa: E731
        return Trial(lambda: module(s, z, way, own), error, spent, steps=True)

    for name, way in ways.items():
        if name == "cuEquivariance":
            continue
        table.time(lambda w=way: trial(w, None, 0.0), way=f"{name}, bias in each step", **facts)
        table.time(lambda w=way: trial(w, bias, once), way=f"{name}, bias kept", **facts)
    for rank in (r for r in ranks if r <= len(z)):

        def of_rank(rank: int = rank) -> Trial:
            way, spent = made_once(lambda: kept(bias, rank), table.device)
            return trial(way, bias, once + spent)

        table.time(of_rank, way="ours, factors kept", rank=rank, **facts)
    rows = table.good(**facts)
    if {row["way"] for row in rows} >= {DENSE_KEPT, "ours, factors kept"}:
        for sentence in break_even(rows, DENSE_KEPT, "ours, factors kept"):
            print(f"diffusion at N = {len(z)}, {sentence}", flush=True)


def told(table: Table) -> Iterator[str]:
    """How much faster the exact form of triangle attention is than its peers."""
    for row in table.good(component="triangle attention, starting", way="ours, dense"):
        same = table.good(component=row["component"], n=row["n"], mode=row["mode"])
        peers = {r["way"]: float(r["ms"]) for r in same if not r["way"].startswith("ours")}
        ratios = (f"{ms / float(row['ms']):.2f} x {way}" for way, ms in peers.items())
        yield f"{row['mode']}, N = {row['n']}: ours, dense is {', '.join(ratios)}"


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Triangle attention by N, and the error of factors by their rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    good = [r for r in rows if r["status"] == "ok" and r["mode"] == "inference"]
    triangles = [r for r in good if r["component"] == "triangle attention, starting"]
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in triangles:
        label = f"{row['way']}, rank {row['rank']}" if row["rank"] else row["way"]
        lines.setdefault(label, []).append((int(row["n"]), float(row["ms"])))
    for label, points in lines.items():
        left.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    left.set(xscale="log", yscale="log", xlabel="N", ylabel="ms", title="triangle attention")
    if lines:
        left.legend(fontsize=6)
    for n in sorted({int(r["n"]) for r in triangles}):
        points = [(int(r["rank"]), float(r["error"])) for r in triangles
                  if int(r["n"]) == n and r["way"] == "ours, factors kept"]  # fmt: skip
        if points:
            right.plot(*zip(*sorted(points), strict=True), marker="o", label=f"N = {n}")
    right.set(yscale="log", xlabel="rank", ylabel="relative error of the output, random weights")
    if right.lines:
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
    parser.add_argument("--step-ranks", type=int, nargs="*", default=STEP_RANKS,
                        help="of the diffusion")  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", default=["*"], metavar="PATTERN",
                        help="only these, e.g. 'ours, dense' 'SDPA*'")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=60.0, help="for a row; 0: none")
    parser.add_argument("--stop-s", type=float, default=0.0, help="begin no row after; 0: none")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    parser.add_argument("--no-compile", action="store_true", help="leave out FlexAttention")
    parser.add_argument("--tiny", action="store_true", help="a block that a CPU runs in seconds")
    return parser.parse_args()


def measure_all(args: argparse.Namespace, table: Table) -> None:
    """All rows that are asked for, the parts in their order.

    Raises:
        Stopped: after --stop-s.
    """
    dtype = getattr(torch, args.dtype)
    pair, heads, single, single_heads = (16, 2, 32, 2) if args.tiny else (128, 4, 384, 16)
    sizes, ranks, step_ranks = args.sizes, args.ranks, args.step_ranks
    crop, steps_at = CROP, DIFFUSION
    if args.tiny:
        sizes, ranks, step_ranks, crop, steps_at = (12, 17), (2,), (2, 4), 12, 12
    torch.manual_seed(0)
    block = Pairformer(pair, heads, single, single_heads).to(args.device, dtype)
    ways = exact_ways(not args.no_compile)

    def states(n: int) -> tuple[Tensor, Tensor]:
        torch.compiler.reset()  # shapes add up, and past a limit nothing would be compiled
        return protein(n, pair, single, args.device, dtype)

    for part in args.parts:
        if part == "diffusion":
            diffusion(table, ways, states(steps_at)[1], step_ranks, single_heads, 2 * single)
        elif part == "training":
            training(table, ways, block, *states(crop))
        else:
            for n in sizes:
                inference(table, ways, block, *states(n), ranks)


def main() -> None:
    """Print and write a row per size, component and way, and draw."""
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    table = Table(
        args.output / "pairformer.csv",
        args.device,
        getattr(torch, args.dtype),
        repeats=1 if args.tiny else args.repeats,
        limit_s=args.limit_s,
        stop_s=args.stop_s,
        resume=args.resume,
        ways=args.ways,
    )
    try:
        measure_all(args, table)
    except Stopped as why:
        print(why)
    for sentence in told(table):
        print(sentence)
    if table.rows:
        draw(table.rows, args.output / "pairformer.png")


if __name__ == "__main__":
    main()
