"""Is the form that `auto` takes for a bias the fastest one that is good enough? On this card.

python scripts/check_choice.py [--output FILE.csv] [--resume]

Ten sites: the trained SwinV2 and Pangu of `examples/`, and biases of the kinds that other models
have, at their sizes. Every site is carried by the choice, and by each single form that keeps the
same criteria: a table, a dense bias, factors of the rank that they need. `share` is the time of a
form over that of the fastest; the check is that the choice has at most 1.05. Times are those of
CUDA graph replays in bf16, with about as many scores for every site. Rows are written site by site;
--resume keeps the sites that have all of their rows, of the same terms, card and versions.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from attention_shapes import window_codes
from measure_costs import SCORES
from row_file import Row, RowFile
from torch import Tensor
from tune_attention import time_ms
from turns import alone

from flashbias_convert import Dense, LowRank, ScoreBias, inspect_model
from flashbias_convert.attention import PreparedBias, flashbias_attention
from flashbias_convert.checkpoint import open_model
from flashbias_convert.decompose import decompose
from flashbias_convert.decompose.costs import BUCKETS
from flashbias_convert.options import DecomposeOptions

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
ALLOWED = 1.05
COLUMNS = ("site", "n", "head_size", "form", "terms", "ms", "share", "card", "torch", "triton")


@dataclass(frozen=True)
class Site:
    """A bias (H, N, N) as a model in bf16 has it, and the size of a head."""

    name: str
    bias: Tensor
    head_dim: int
    index: Tensor | None = None


def trained() -> Iterator[Site]:
    """Sites of the examples with the largest windows."""
    wanted = {"swinv2_cifar10": 3, "pangu_era_interim": 1}
    for example, count in wanted.items():
        model = open_model(ROOT / "examples" / example).model
        sites = inspect_model(model, method="exact").patched
        sites = sorted(sites, key=lambda s: (s.n, s.name), reverse=True)[: count * 2 : 2]
        for site in sites:
            assert site.bias is not None
            terms = [t for t in site.bias.terms if t.kind in ("relative_table", "dense")]
            bias = ScoreBias(tuple(terms), site.heads).dense(site.n, site.m)
            bias = bias.reshape(-1, *bias.shape[-3:])[0]
            yield Site(f"{example} {site.name}", bias.bfloat16(), site.head_dim)


def made() -> Iterator[Site]:
    """Biases like those of other models."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    def by_index(heads: int, n: int) -> tuple[Tensor, Tensor]:
        u, v, size = window_codes(n)
        index = u[:, None] + v[None, :]
        return normal(heads, size)[:, index], index

    bias, index = by_index(8, 144)
    yield Site("random table, windows of 144, heads of 32", bias, 32, index)
    bias, index = by_index(8, 576)
    yield Site("random table, windows of 576, heads of 64", bias, 64, index)
    steps = (torch.arange(2048)[:, None] - torch.arange(2048)[None, :]).abs()
    buckets = (4 * (1 + steps).double().log2()).long()
    yield Site("logarithmic buckets, N = 2,048, heads of 128", normal(8, 64)[:, buckets], 128)
    yield Site("pair bias without structure, N = 512, heads of 32", normal(4, 512, 512), 32)
    low = (normal(4, 1024, 20).float() @ normal(4, 20, 1024).float() / 4).bfloat16()
    yield Site("pair bias of rank 20, N = 1,024, heads of 32", low, 32)
    points = torch.rand(1024, 3, generator=generator)
    gravity = (1 / (torch.cdist(points, points).square() + 0.01)).clamp(max=20)
    yield Site("gravity, N = 1,024, heads of 64", gravity.bfloat16().expand(4, -1, -1).clone(), 64)


def forms(site: Site) -> dict[str, ScoreBias]:
    """The choice and its rivals, all of which keep the criteria."""
    options = {"head_dim": site.head_dim, "index": site.index}
    # the calls that are timed have neither masks nor cosines, and entries that share the bias
    chosen = decompose(site.bias, DecomposeOptions(force_all=True), shared=True, **options)
    exact = decompose(site.bias, DecomposeOptions(method="exact"), **options).bias
    svd = decompose(site.bias, DecomposeOptions(method="svd"), **options).bias
    dense = ScoreBias((Dense(bias=site.bias),), site.bias.shape[0])
    found = {"choice": chosen.bias, "dense": dense}
    if all(term.kind == "relative_table" for term in exact.terms):
        found["relative_table"] = exact
    ranks = [max(t.head_ranks()) if isinstance(t, LowRank) else math.inf for t in svd.terms]
    if ranks and max(ranks) <= BUCKETS[-1]:
        found["low_rank"] = svd
    return found


def make_call(site: Site, bias: ScoreBias) -> Callable[[], Tensor]:
    """A function without arguments that runs the attention once."""
    heads, n = site.bias.shape[0], site.bias.shape[-1]
    batch = max(1, SCORES // (heads * n * n))
    size = (batch, n, 3, heads, site.head_dim)
    q, k, v = torch.randn(size, device=DEVICE).bfloat16().permute(2, 0, 3, 1, 4).unbind(0)
    prepared = PreparedBias(bias.to(DEVICE))
    return lambda: flashbias_attention(q, k, v, prepared, backend="triton")


def rows_of(site: Site, where: dict[str, str], table: RowFile) -> list[Row]:
    """The row of each form, measured now where one of them is not known."""
    found = forms(site)
    kinds = "+".join(dict.fromkeys(t.kind for t in found["choice"].terms)) or "none"
    rows = {
        name: {"site": site.name, "n": str(site.bias.shape[-1]), "head_size": str(site.head_dim),
               "form": name, "terms": kinds if name == "choice" else name, **where}
        for name in found
    }  # fmt: skip
    known = [table.find(row) for row in rows.values()]
    # another choice than before is compared with its rivals anew: they are one measurement
    if all(row is not None and row["terms"] == rows[row["form"]]["terms"] for row in known):
        return [row for row in known if row is not None]
    with alone():
        times = {name: time_ms(make_call(site, bias)) for name, bias in found.items()}
    fastest = min(times.values())
    return [
        table.add(rows[name] | {"ms": f"{ms:.4f}", "share": f"{ms / fastest:.3f}"})
        for name, ms in times.items()
    ]


def main() -> None:
    """Print and write a row per site and form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resume", action="store_true", help="keep the sites of the output")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/check_choice.csv")
    options = parser.parse_args()
    where = {"card": torch.cuda.get_device_name(), "torch": torch.__version__,
             "triton": triton.__version__}  # fmt: skip
    table = RowFile(
        options.output, COLUMNS, key=("site", "n", "head_size", "form", "card"),
        versions=("torch", "triton"), resume=options.resume,
    )  # fmt: skip
    good = sites = 0
    for site in (*trained(), *made()):
        rows = rows_of(site, where, table)
        for row in rows:
            print(*row.values(), sep=" | ", flush=True)
        choice = next(row for row in rows if row["form"] == "choice")
        good, sites = good + (float(choice["share"]) <= ALLOWED), sites + 1
    print(f"{good} of {sites} choices within {ALLOWED - 1:.0%} of the fastest form")


if __name__ == "__main__":
    main()
