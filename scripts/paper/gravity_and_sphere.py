"""Biases of gravity and of distances on a sphere, by factor networks and by their rivals.

python scripts/paper/gravity_and_sphere.py [--device cuda] [--case-s 120] [--output DIR]
                                           [--stop-s S] [--resume] [--tiny]

The appendix "Generalization for Diverse Biases" of the FlashBias paper: gravity,
1 / (distance^2 + 0.01) over the unit square, and the great-circle distance over latitudes in
[-pi, pi] and longitudes in [0, 2 pi], R = 32. Networks see the coordinates, or, as a variant,
the unit vectors of the sphere's points. Every row of the table is measured on points that no fit
has seen; relative errors are Frobenius norms, of the bias as it is and with its rows centred.

Writes gravity_and_sphere.csv, and a picture of the true bias, the fitted one and the residual.
The columns device, points, steps and tokens say how large the run was. A case takes at most
--case-s seconds: fits share what is left of them, and make as many of their steps as the time of
the first ones allows, with the schedule of so many; the column seconds has what a fit took, that
measuring included. What is not begun in time, or ends too late, says so in its row. After --stop-s
no row is begun; --resume keeps the rows of the file and adds those that it lacks.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fit_in_time import TookTooLong, fit_in
from torch import Tensor

from flashbias_convert.decompose import row_center
from flashbias_convert.decompose.low_rank_diagonal import best_diagonal
from flashbias_convert.decompose.low_rank_sparse import (
    LowRankSparse,
    low_rank_beside_cells,
    low_rank_plus_sparse,
)
from flashbias_convert.decompose.neural import Check, FitResult, fit_factor_networks
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.decompose.robust_svd import robust_svd

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "bias", "method", "rank", "kept_cells", "raw_error", "centred_error", "seconds", "steps",
    "hidden", "tokens", "points", "seed", "status", "device", "torch",
)  # fmt: skip
#: cells per row that "nearest" keeps, the point itself among them
NEAREST = 8
#: of the sparse part in the pursuit; 1, the choice of theory, keeps too many cells to be sparse
WEIGHT = 6.0
#: names of methods
NETWORKS, UNTRAINED = "networks", "networks, no training"
AS_IN_THE_PAPER = "networks, as in the paper"
NEAREST_METHOD, PURSUIT = f"{NEAREST} nearest + SVD", "sparse (pursuit) + SVD"
#: seconds of a case that fits leave to what comes after them
RESERVE_S = 15.0
#: what the picture needs of cases that are done, until all are
PIECES = "gravity_and_sphere.pieces.pt"
#: seed of the points that judge; fits draw theirs from other seeds
UNSEEN = 987_654_321


def gravity(x: Tensor, y: Tensor) -> Tensor:
    """(*batch, N, 2), (*batch, M, 2) -> (*batch, 1, N, M)."""
    squares = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)
    return 1 / (squares + 0.01).unsqueeze(-3)


def great_circle(x: Tensor, y: Tensor) -> Tensor:
    """Distances on the unit sphere between (latitude, longitude); the haversine formula."""
    (lat, lon), (lat2, lon2) = x[..., :, None, :].unbind(-1), y[..., None, :, :].unbind(-1)
    half = ((lat - lat2) / 2).sin().square()
    half = half + lat.cos() * lat2.cos() * ((lon - lon2) / 2).sin().square()
    return (2 * half.clamp(0, 1).sqrt().asin()).unsqueeze(-3)


def chord_to_arc(x: Tensor, y: Tensor) -> Tensor:
    """The same between unit vectors."""
    chord = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1).sqrt()
    return (2 * (chord / 2).clamp(0, 1).asin()).unsqueeze(-3)


def square(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, 2, generator=generator, device=generator.device)


def angles(count: int, generator: torch.Generator) -> Tensor:
    u = square(count, generator)
    return torch.stack([(2 * u[:, 0] - 1) * math.pi, 2 * math.pi * u[:, 1]], -1)


def vectors(count: int, generator: torch.Generator) -> Tensor:
    lat, lon = angles(count, generator).unbind(-1)
    return torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], -1)


@dataclass(frozen=True)
class Case:
    """A bias, and where its tokens come from."""

    name: str
    bias: Callable[[Tensor, Tensor], Tensor]
    tokens: Callable[[int, torch.Generator], Tensor]

    def unseen(self, count: int, device: str) -> Tensor:
        """Points for the table and the picture, in an order that shows structure."""
        points = self.tokens(count, torch.Generator(device).manual_seed(UNSEEN))
        stripe = (points[:, 0] / points[:, 0].abs().max() * 8).floor()
        return points[(stripe * 100 + points[:, 1]).argsort()]


CASES = {
    case.name: case
    for case in (
        Case("gravity", gravity, square),
        Case("sphere, angles", great_circle, angles),
        Case("sphere, unit vectors", chord_to_arc, vectors),
    )
}


@dataclass(frozen=True)
class Result:
    """One row: an approximation, exact up to row constants or not at all."""

    method: str
    approximation: Tensor
    seconds: float = 0.0
    kept_cells: float = 0.0
    steps: int = 0
    #: whether the rows of the approximation are centred, and it says nothing of their means
    centred: bool = False

    def errors(self, bias: Tensor) -> tuple[float | None, float]:
        """Relative Frobenius errors, raw and after row-centring."""
        wide = self.approximation.double()
        raw = None if self.centred else _relative(wide - bias, bias)
        return raw, _relative(row_center(wide - bias), row_center(bias))


def _relative(error: Tensor, size: Tensor) -> float:
    return float(error.norm() / size.norm())


#: makes the rows of a method; gets the seconds that it may take
Method = Callable[[float], list[Result]]


def timed(make: Callable[[], Result]) -> list[Result]:
    """A row, with the seconds that it took."""
    started = time.perf_counter()
    found = make()
    return [replace(found, seconds=time.perf_counter() - started)]


def truncations(bias: Tensor, rank: int) -> dict[str, Method]:
    """The best of the same rank, of a bias (N, N), float64."""

    def raw() -> Result:
        return Result("SVD, raw", _truncated(bias, rank))

    def centred() -> Result:
        return Result("SVD, rows centred", _truncated(row_center(bias), rank), centred=True)

    return {"SVD, raw": lambda _: timed(raw), "SVD, rows centred": lambda _: timed(centred)}


def rivals(bias: Tensor, rank: int) -> dict[str, Method]:
    """What else is possible beside factors of the same rank, of a bias (N, N), float64."""

    def diagonal() -> Result:
        matrix = row_center(bias)
        unit = row_center(torch.eye(len(bias), dtype=bias.dtype, device=bias.device))
        zero = torch.zeros_like(bias[:1])
        found, _ = best_diagonal(matrix[None], unit, rank, (zero, bias.diagonal()[None]))
        part = found[0, :, None] * unit
        made = _truncated(matrix - part, rank) + part
        return Result("SVD + diagonal", made, kept_cells=1 / len(bias), centred=True)

    def nearest() -> Result:
        largest = bias.abs() if bias.diagonal().mean() > bias.mean() else -bias.abs()
        cells = torch.zeros_like(bias, dtype=torch.bool)
        cells.scatter_(1, largest.topk(NEAREST, -1).indices, True)
        return _sparse(NEAREST_METHOD, low_rank_beside_cells(bias[None], cells, rank=rank))

    def pursuit() -> Result:
        return _sparse(PURSUIT, low_rank_plus_sparse(bias[None], rank=rank, weight=WEIGHT))

    return {
        "SVD + diagonal": lambda _: timed(diagonal),
        NEAREST_METHOD: lambda _: timed(nearest),
        PURSUIT: lambda _: timed(pursuit),
    }


def _sparse(method: str, found: LowRankSparse) -> Result:
    n = found.values.shape[-1]
    both = found.low_rank.dense(n, n, dtype=torch.float64) + found.values
    return Result(method, both[0], kept_cells=float(found.density), centred=True)


def _truncated(matrix: Tensor, rank: int) -> Tensor:
    u, values, v = (x[0] for x in robust_svd(matrix[None], vectors=True))
    return (u[:, :rank] * values[:rank]) @ v[:, :rank].mT


def fits(case: Case, points: Tensor, args: argparse.Namespace) -> dict[str, Method]:
    """Factor networks: without training, trained as here, and trained as in the paper."""
    asked: dict[str, Any] = {
        "loss": args.loss, "energy": None, "max_attention_error": None, "seed": args.seed,
        "check_every": min(args.check_every, args.steps), "hidden": args.hidden,
    }  # fmt: skip

    def fit(options: FitOptions, progress: Callable[[Check], None]) -> FitResult:
        return fit_factor_networks(
            case.bias,
            lambda generator: case.tokens(args.tokens, generator),
            rank=args.rank,
            heads=1,
            options=options,
            device=args.device,
            progress=progress,
        )

    def fitted(limit: float, method: str, **how: Any) -> list[Result]:
        started = time.perf_counter()
        options = FitOptions(**{"steps": args.steps, **asked, **how})
        found = fit_in(fit, options, math.inf if method == UNTRAINED else limit)
        made = _product(found, points)
        seconds = time.perf_counter() - started
        first = Result(method, made, seconds, steps=0 if how.get("steps") else found.steps)
        if method != NETWORKS:
            return [first]
        kept = made.clone()
        kept.diagonal().copy_(case.bias(points, points)[0].diagonal())
        beside = Result(f"{NETWORKS} + diagonal", kept, seconds, 1 / len(points), found.steps)
        return [first, beside]

    return {
        UNTRAINED: lambda limit: fitted(limit, UNTRAINED, steps=1, learning_rate=1e-30),
        NETWORKS: lambda limit: fitted(limit, NETWORKS),
        AS_IN_THE_PAPER: lambda limit: fitted(
            limit, AS_IN_THE_PAPER, schedule="step", closed_form=False
        ),
    }


@torch.no_grad()
def _product(found: FitResult, points: Tensor) -> Tensor:
    phi_q, phi_k = found.networks.factors(points, points)
    return (phi_q.double() @ phi_k.double().mT)[0]


def draw_pictures(pictures: list[tuple[str, Tensor, Tensor]], path: Path, note: str) -> None:
    """A row per case: the true bias, the fitted one, the residual."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(pictures), 3, figsize=(12, 3.7 * len(pictures)), squeeze=False)
    for row, (name, bias, made) in zip(axes, pictures, strict=True):
        low, high = (
            float(bias.min()),
            float(bias.quantile(0.999) if len(bias) < 4000 else bias.max()),
        )
        residual = bias - made
        edge = float(residual.abs().max())
        shown = ((name, bias, low, high, "viridis"), ("networks", made, low, high, "viridis"),
                 ("residual", residual, -edge, edge, "RdBu_r"))  # fmt: skip
        for axis, (title, matrix, bottom, top, colours) in zip(row, shown, strict=True):
            image = axis.imshow(matrix.cpu(), vmin=bottom, vmax=top, cmap=colours)
            axis.set_title(title)
            axis.set_xticks([])
            axis.set_yticks([])
            figure.colorbar(image, ax=axis, fraction=0.046)
    figure.suptitle(note)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=int, default=1024, help="of the table and the picture")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--case-s", type=float, default=0.0, help="for a case; 0: no limit")
    parser.add_argument("--stop-s", type=float, default=0.0, help="begin no row after; 0: none")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds")
    parser.add_argument("--tokens", type=int, default=1024, help="points of a training step")
    parser.add_argument("--check-every", type=int, default=500)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=256, help="width of a hidden layer")
    parser.add_argument("--loss", choices=("raw", "centred", "attention"), default="raw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results")
    args = parser.parse_args()
    if args.tiny:
        args.points, args.steps, args.tokens, args.rank, args.hidden = 24, 2, 16, 3, 8
    return args


def rows_of(
    case: Case, points: Tensor, bias: Tensor, args: argparse.Namespace, known: Collection[str],
    ends: float,
) -> Iterator[tuple[dict[str, Any], Result | None]]:  # fmt: skip
    """Columns and results of a case, method by method, for as long as there is time.

    Args:
        known: methods whose rows are there.
        ends: nothing is begun after this, see `time.monotonic`.
    """
    started = time.monotonic()
    methods = truncations(bias, args.rank) | fits(case, points, args) | rivals(bias, args.rank)
    fits_left = [name for name in (NETWORKS, AS_IN_THE_PAPER) if name not in known]
    for name, method in methods.items():
        if name in known:
            continue
        if time.monotonic() > ends:
            return
        left = args.case_s - (time.monotonic() - started) if args.case_s else math.inf
        if left < 0:
            yield {"method": name, "status": f"not begun after {args.case_s:g} s"}, None
            continue
        share = math.inf
        if name in fits_left:
            share = max((left - RESERVE_S) / len(fits_left), left / 4)
            fits_left.remove(name)
        try:
            found = method(share)
        except TookTooLong as why:
            yield {"method": name, "status": str(why)}, None
            continue
        for result in found:
            raw, centred = result.errors(bias)
            yield (
                {
                    "method": result.method,
                    "kept_cells": f"{result.kept_cells:.4f}",
                    "raw_error": "" if raw is None else f"{raw:.5f}",
                    "centred_error": f"{centred:.5f}",
                    "seconds": f"{result.seconds:.1f}",
                    "steps": result.steps,
                    "status": "ok",
                },
                result,
            )


Pieces = dict[str, tuple[Tensor, Tensor]]


def begin(args: argparse.Namespace) -> tuple[dict[str, set[str]], Pieces]:
    """Begin the table, or go on with it: methods of each case that are there, and pictures."""
    path, pieces = args.output / "gravity_and_sphere.csv", args.output / PIECES
    known: dict[str, set[str]] = {}
    if args.resume and path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                known.setdefault(row["bias"], set()).add(row["method"])
        return known, torch.load(pieces, weights_only=True) if pieces.is_file() else {}
    pieces.unlink(missing_ok=True)
    with path.open("w", newline="") as file:
        csv.DictWriter(file, COLUMNS).writeheader()
    return known, {}


def main() -> None:
    """Print and write a row per case and method, and draw."""
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    cuda = args.device.startswith("cuda")
    device = (
        torch.cuda.get_device_name(args.device)
        if cuda
        else f"CPU, {torch.get_num_threads()} threads"
    )
    ends = time.monotonic() + args.stop_s if args.stop_s else math.inf
    known, pieces = begin(args)
    for case in (CASES[name] for name in args.cases):
        points = case.unseen(args.points, args.device)
        bias = case.bias(points.double(), points.double())[0]
        where = {
            "bias": case.name, "rank": args.rank, "hidden": args.hidden, "tokens": args.tokens,
            "points": args.points, "seed": args.seed, "device": device,
            "torch": torch.__version__,
        }  # fmt: skip
        for row, result in rows_of(case, points, bias, args, known.get(case.name, ()), ends):
            if result is not None and result.method == NETWORKS:
                pieces[case.name] = (bias.cpu(), result.approximation.cpu())
                torch.save(pieces, args.output / PIECES)
            with (args.output / "gravity_and_sphere.csv").open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS, restval="").writerow({**where, **row})
            print(case.name, *row.values(), flush=True)
    note = f"{device}, {args.points} points, at most {args.steps} steps, rank {args.rank}"
    if pieces:
        shown = [(name, *pieces[name]) for name in CASES if name in pieces]
        draw_pictures(shown, args.output / "gravity_and_sphere.png", note)
    if len(pieces) == len(args.cases):
        (args.output / PIECES).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
