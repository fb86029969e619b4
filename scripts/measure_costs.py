"""What attention costs per score with every form of a bias, and without one, on this card.

python scripts/measure_costs.py [--lengths N ...] [--head-sizes D ...] [--forms FORM ...] [--resume]
    [--output F.csv]

bf16, forward, time on the card (CUDA graph replays). The batch is chosen so that every length has
about the same number of scores. "dense" is a bias whose tiles nobody shares, as beside a mask or in
cosine attention; "dense, shared" one whose tiles batch entries may share, at the head sizes where
they do. "dense, sdpa" is a dense bias in torch's fused attention, what a converted site is compared
with. Kernels are compiled in parallel processes first. Writes the table that the choice of terms
counts with, `flashbias_convert/decompose/cost_table.csv`, row by row; --resume keeps the rows of
other classes of cards, and does not measure again those of this card and these versions. Rows of
its class from other cards or versions are replaced one by one. `measure_factor_times.py` measures
how long factors take to make.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from attention_launches import apart
from attention_shapes import Shape, alibi, codes, dense, lookup, low_rank, pairs, with_regions
from row_file import VERSIONS, RowFile
from torch import Tensor
from tune_attention import time_ms
from turns import alone

from flashbias_convert import Diagonal, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention
from flashbias_convert.cost_tables import CLASSES, FIELDS
from flashbias_convert.decompose.costs import PAIRS, SHARED_DENSE

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
TABLE = ROOT / "flashbias_convert/decompose/cost_table.csv"
HEADS = 8
SCORES = 2**28
Make = Callable[[Shape, torch.device], ScoreBias]
#: length, head size and form
Job = tuple[int, int, str]


def with_diagonal(make: Make) -> Make:
    """Another bias plus a diagonal."""

    def both(shape: Shape, device: torch.device) -> ScoreBias:
        own = Diagonal(values=torch.randn(shape.heads, shape.n, device=device))
        return make(shape, device) + ScoreBias((own,), shape.heads)

    return both


def nothing(shape: Shape, device: torch.device) -> ScoreBias:
    """No bias at all."""
    return ScoreBias((), shape.heads)


FORMS: dict[str, Make] = {
    "none": nothing,
    **{f"low_rank {rank}": low_rank(rank) for rank in (16, 32, 64, 128, 256)},
    "low_rank 16 + diagonal": with_diagonal(low_rank(16)),
    "relative_table": codes,
    PAIRS: pairs,
    "lookup": lookup,
    "dense": dense,
    "alibi": alibi,
    "regions": with_regions(nothing),
}
#: A dense bias in torch's fused attention.
SDPA = "dense, sdpa"
#: The widest heads whose batch entries share tiles, see `tuning`.
WIDEST_SHARED = 32


def shape_of(n: int, d: int) -> Shape:
    """About `SCORES` scores."""
    return Shape((max(1, SCORES // (HEADS * n * n)),), HEADS, n, d)


def make_call(n: int, d: int, form: str) -> Callable[[], Tensor]:
    """A function without arguments that runs the attention once."""
    shape = shape_of(n, d)
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.bfloat16, DEVICE)
    if form == SDPA:
        mask = dense(shape, DEVICE).dense(n, n, dtype=torch.bfloat16)
        return lambda: F.scaled_dot_product_attention(q, k, v, mask[None])
    make = dense if form == SHARED_DENSE else FORMS[form]
    bias = PreparedBias(make(shape, DEVICE))
    return lambda: flashbias_attention(q, k, v, bias, backend="triton")


def sharing(form: str) -> AbstractContextManager[object]:
    """Inside, batch entries share tiles in the form alone that is about that."""
    return nullcontext() if form == SHARED_DENSE else apart()


def forms_at(head_size: int) -> list[str]:
    """What is measured at a head size."""
    return [*FORMS, *([SHARED_DENSE] if head_size <= WIDEST_SHARED else []), SDPA]


def compile_one(job: Job) -> None:
    """Compile what a job launches; failures show again when it is timed."""
    try:
        with sharing(job[2]):
            make_call(*job)()
        torch.cuda.synchronize()
    except Exception as problem:
        print(*job, str(problem).splitlines()[0][:100], flush=True)


def measured(job: Job) -> dict[str, str]:
    """What a row says of its time."""
    n = job[0]
    with sharing(job[2]):
        ms = time_ms(make_call(*job))
    scores = shape_of(*job[:2]).batch[0] * HEADS * n * n
    return {"ms": f"{ms:.4f}", "ps_per_score": f"{1e9 * ms / scores:.4f}"}


def facts(job: Job, where: dict[str, str]) -> dict[str, str]:
    """What a row says of what is measured, and where."""
    n, d, form = job
    return {"head_size": str(d), "n": str(n), "form": form, **where}


def main() -> None:
    """Compile, time, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*",
                        default=[64, 144, 256, 576, 1024, 2048, 4096])  # fmt: skip
    parser.add_argument("--head-sizes", type=int, nargs="*", default=[32, 64, 128])
    parser.add_argument("--forms", nargs="*", help="measure these alone, and again")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    where = {"class": CLASSES[torch.cuda.get_device_capability()],
             "card": torch.cuda.get_device_name(), "torch": torch.__version__,
             "triton": triton.__version__}  # fmt: skip
    key = ("head_size", "n", "form", "class")
    table = RowFile(options.output, FIELDS, key=key, versions=VERSIONS, resume=options.resume)
    jobs = [
        (n, d, form) for d in options.head_sizes for n in options.lengths for form in forms_at(d)
    ]
    if options.forms:  # of these the rows that there are do not count
        jobs = [job for job in jobs if job[2] in options.forms]
    else:
        jobs = [job for job in jobs if table.find(facts(job, where)) is None]
    if not jobs:
        return
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        pool.map(compile_one, jobs, chunksize=2)
    with alone():
        for job in jobs:
            row = table.add(facts(job, where) | measured(job))
            print(*list(row.values())[:5], flush=True)


if __name__ == "__main__":
    main()
