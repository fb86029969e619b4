"""How long factors of a bias take to make on this card, by heads, tokens and rank.

python scripts/measure_factor_times.py [--heads H ...] [--lengths N ...] [--ranks R ...] [--resume]
    [--output F.csv]
python scripts/measure_factor_times.py --from scripts/results/pairformer.csv [--output F.csv]

Median time of `decompose_quickly` between two events of the card, for a bf16 bias that is there
already: checks, SVD, what is lost, and all that the host does meanwhile. Seconds for all points.

Writes the table that `factors_once` counts with, `flashbias_convert/decompose/factor_times.csv`,
row by row. Rows of other classes of cards stay. Those of this class go when the first row is
written, as times of other programs must not be read beside these; with --resume those of this
script, card and torch stay and are not measured again.

With --from nothing runs: rows come from once_ms of the Pairformer's table, by the clock. Those of
its diffusion are without what making the bias took; those of its other parts contain that, which is
too much rather than too little."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from row_file import Row, RowFile, read
from turns import alone

from flashbias_convert.cost_tables import CLASSES
from flashbias_convert.decompose.factor_times import FIELDS
from flashbias_convert.decompose.randomised import decompose_quickly

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "flashbias_convert/decompose/factor_times.csv"
SOURCE, EARLIER = "scripts/measure_factor_times.py", "scripts/results/pairformer.csv"
WHAT, SVD, WITH_BIAS = "decompose_quickly", "SVD", "SVD, and making the bias"
KEY, VERSIONS = ("heads", "n", "rank", "class"), ("card", "torch", "source")
#: heads of what the Pairformer's table times, and the names of the cards there
HEADS = {"triangle attention, starting": 4, "attention with pair bias": 16, "diffusion step": 16}
CARDS = {"NVIDIA H200": "hopper"}
#: repetitions before those that count, and of those
WARM, REPEATS = 2, 7
#: heads, tokens and rank
Job = tuple[int, int, int]


def make_call(heads: int, n: int, rank: int) -> Callable[[], object]:
    """A function without arguments that makes factors once; times do not depend on the numbers."""
    draw = torch.Generator("cuda").manual_seed(0)
    bias = torch.randn(1, heads, n, n, generator=draw, device="cuda").bfloat16()
    return lambda: decompose_quickly(bias, rank=rank)


def time_ms(call: Callable[[], object]) -> float:
    """Median milliseconds between two events, with what the card waits for in between."""
    times = []
    for _ in range(WARM + REPEATS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[WARM:])


def facts(job: Job, where: Row) -> Row:
    """What a row says of what is measured, and where."""
    heads, n, rank = map(str, job)
    return {"heads": heads, "n": n, "rank": rank, "what": WHAT, **where}


def earlier(rows: list[Row]) -> Iterator[Row]:
    """Rows from those of the Pairformer's table."""
    kept = {r["n"]: r for r in rows if r["way"] == "ours, dense, bias kept"}
    for row in rows:
        known = row["component"] in HEADS and row["mode"] == "inference" and row["status"] == "ok"
        if not known or row["way"] != "ours, factors kept":
            continue
        stepwise = row["component"] == "diffusion step"
        bias = float(kept[row["n"]]["once_ms"]) if stepwise else 0.0
        yield {
            "heads": str(HEADS[row["component"]]), "n": row["n"], "rank": row["rank"],
            "ms": f"{float(row['once_ms']) - bias:.3f}", "what": SVD if stepwise else WITH_BIAS,
            "class": CARDS[row["device"]], "card": row["device"], "torch": row["torch"],
            "source": EARLIER,
        }  # fmt: skip


def write_earlier(path: Path, output: Path) -> None:
    """Rows from the Pairformer's table; of two that tell of the same, the diffusion's."""
    found: dict[tuple[str, ...], Row] = {}
    for row in earlier(read(path)):
        place = tuple(row[name] for name in KEY)
        if place not in found or row["what"] == SVD:
            found[place] = row
    classes = {row["class"] for row in found.values()}
    table = RowFile(output, FIELDS, key=KEY, versions=VERSIONS,
                    others=lambda r: r["class"] not in classes)  # fmt: skip
    for row in sorted(found.values(), key=lambda r: [int(r[k]) for k in KEY[:3]]):
        table.add(row)


def measure(jobs: list[Job], output: Path, resume: bool) -> None:
    """Time, print and write."""
    own = CLASSES[torch.cuda.get_device_capability()]
    where = {"class": own, "card": torch.cuda.get_device_name(), "torch": torch.__version__,
             "source": SOURCE}  # fmt: skip
    table = RowFile(
        output, FIELDS, key=KEY, versions=VERSIONS,
        others=lambda r: r["class"] != own or (resume and r["source"] == SOURCE),
    )  # fmt: skip
    with alone():
        for job in jobs:
            row = facts(job, where)
            if table.find(row) is None:
                row = table.add(row | {"ms": f"{time_ms(make_call(*job)):.3f}"})
                print(*list(row.values())[:4], flush=True)


def main() -> None:
    """Measure, or take what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 768, 2048])
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--resume", action="store_true", help="keep the rows of this script")
    parser.add_argument("--from", dest="earlier", type=Path, help="a table of the Pairformer")
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    if options.earlier is not None:
        return write_earlier(options.earlier, options.output)
    jobs = [(h, n, r) for h in options.heads for n in options.lengths for r in options.ranks]
    measure(jobs, options.output, options.resume)


if __name__ == "__main__":
    main()
