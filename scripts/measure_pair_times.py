"""How long a bias of pairs takes to make on this card, and factors of it by networks.

python scripts/measure_pair_times.py [--lengths N ...] [--heads H ...] [--channels C ...]
    [--ranks R ...] [--resume] [--output F.csv]

bf16, one structure with a padding mask, heads of 32, by CUDA graph replays. A row is what a call of
attention takes more than the same call with its term there already: "linear" projects pairs and
lays the bias out for the kernel, "norm and linear" has a layer norm before it, "laying out" gets
the projected bias, heads last. "networks" is the mean over rows and columns of pairs, and two
networks with hidden layers of 256. "norm" is torch's layer norm of the pairs alone. Differences
below nothing, which are noise, are 0.

Writes the table that fits of networks count with, `flashbias_convert/decompose/pair_times.csv`, row
by row; --resume keeps the rows of other classes of cards, and does not measure again those of this
card and these versions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from row_file import VERSIONS, RowFile
from torch import Tensor, nn
from turns import alone

from flashbias_convert import Dense, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention
from flashbias_convert.cost_tables import CLASSES
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.pair_times import FIELDS, KEY, NETWORKS, NORM, Place
from flashbias_convert.pair_features import pair_features
from flashbias_convert.pair_projection import projected_pairs

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "flashbias_convert/decompose/pair_times.csv"
HEAD_DIM = 32
#: what `projected_pairs` asks a site for
SITE = SimpleNamespace(score_bias=SimpleNamespace(backend="auto"))
#: a term that is made in the call
Make = Callable[[], ScoreBias]
#: what is measured, and at which length
Job = tuple[Place, int]


@cache
def pairs(channels: int, n: int, device: str) -> Tensor:
    """A representation in bf16, (1, N, N, C); times do not depend on the numbers."""
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(1, n, n, channels, generator=draw, device=device).bfloat16()


def maker(place: Place, n: int, device: str) -> Make:
    """A function without arguments that makes the term of a call."""
    what, channels, heads, rank = place
    torch.manual_seed(0)
    if what == NETWORKS:
        z = pairs(channels, n, device)
        mask = torch.ones(1, n, dtype=torch.bool, device=device)
        networks = FactorNetworks(2 * channels, 2 * channels, heads, rank)
        networks.initialise(torch.Generator().manual_seed(0))
        networks = networks.to(device).requires_grad_(False)

        def made() -> ScoreBias:
            x = pair_features(z, mask=mask)
            return ScoreBias((networks.make(x_q=x, x_k=x),), heads)

        return made
    if what == "laying out":
        ready = pairs(heads, n, device)
        return lambda: ScoreBias((Dense(bias=ready.movedim(-1, 1)),), heads)
    linear = nn.Linear(channels, heads, bias=False).to(device, torch.bfloat16)
    norm = nn.LayerNorm(channels).to(device, torch.bfloat16) if what == "norm and linear" else None
    z = pairs(channels, n, device)
    return lambda: ScoreBias((Dense(bias=projected_pairs(SITE, z, linear, norm)),), heads)


def calls(place: Place, n: int, device: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The call that makes its term, and the one whose term is there already."""
    heads, make = place[2], maker(place, n, device)
    q, k, v = (
        torch.randn(1, heads, n, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    ready = PreparedBias(make())
    return (
        lambda: flashbias_attention(q, k, v, make()),
        lambda: flashbias_attention(q, k, v, ready),
    )


def norm_call(channels: int, n: int, device: str) -> Callable[[], Tensor]:
    """torch's layer norm of all pairs."""
    norm, z = nn.LayerNorm(channels).to(device, torch.bfloat16), pairs(channels, n, device)
    return lambda: norm(z)


def places(options: argparse.Namespace) -> Iterator[Job]:
    """All that is measured."""
    for n in options.lengths:
        for channels in options.channels:
            yield (NORM, channels, 0, 0), n
        for heads in options.heads:
            for channels in options.channels:
                for what in ("linear", "norm and linear"):
                    yield (what, channels, heads, 0), n
                for rank in options.ranks:
                    yield (NETWORKS, channels, heads, rank), n
            yield ("laying out", 0, heads, 0), n


def facts(job: Job, where: dict[str, str]) -> dict[str, str]:
    """What a row says of what is measured, and where."""
    (what, channels, heads, rank), n = job
    sizes = {"channels": channels, "heads": heads, "rank": rank, "n": n}
    return {"what": what, **{name: str(size) for name, size in sizes.items()}, **where}


def time_ms(call: Callable[[], Tensor]) -> float:
    """Median milliseconds on the card, without the host."""
    torch.cuda.synchronize()  # the other stream must not overtake what made the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(call, rep=8, return_mode="median"))


@torch.no_grad()
def measured(job: Job, device: str) -> dict[str, str]:
    """What a row says of its time."""
    (what, channels, *_), n = job
    if what == NORM:
        return {"ms": f"{time_ms(norm_call(channels, n, device)):.4f}"}
    whole, without = (time_ms(call) for call in calls(*job, device))
    return {"ms": f"{max(0.0, whole - without):.4f}"}


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 384, 768, 1218, 2048])
    parser.add_argument("--heads", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--channels", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64, 128])
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    where = {"class": CLASSES[torch.cuda.get_device_capability()],
             "card": torch.cuda.get_device_name(), "torch": torch.__version__,
             "triton": triton.__version__}  # fmt: skip
    table = RowFile(options.output, FIELDS, key=KEY, versions=VERSIONS, resume=options.resume)
    with alone():
        for job in places(options):
            row = facts(job, where)
            if table.find(row) is None:
                pairs.cache_clear()  # a representation of 2,048 tokens has a gigabyte
                row = table.add(row | measured(job, "cuda"))
                print(*list(row.values())[:6], flush=True)


if __name__ == "__main__":
    main()
