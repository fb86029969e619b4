"""Measure how many programs should share the keys of a row when there are few queries.

python scripts/tune_parts.py [--output FILE.csv] [--stop-s S] [--resume] [--tiny]

One query and 1024 to 65,536 keys in bf16, without a bias and with ALiBi: our kernel with 1, 2, 4,
... 64 parts and with what `flashbias_convert/attention/parts.py` chooses by itself, beside torch's
attention without a bias. Each time is that of one call in a CUDA graph that walks the keys of
several layers, more than a cache holds, as a model that decodes does. `error` is relative to
float64, of two heads. Writes a table, row by row, and prints the best number of parts beside the
rule's; --resume keeps the rows of the same dtype, card and versions and measures the others.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from failures import is_lost, lacked_beside_others, no_row
from row_file import RowFile
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from turns import alone

from flashbias_convert import Alibi, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention, launch
from flashbias_convert.attention.packing import GroupSpec

ROOT = Path(__file__).resolve().parent.parent
FIELDS = (
    "batch", "heads", "d", "keys", "bias", "way", "parts", "median_us", "p20_us", "p80_us",
    "gb_per_s", "error", "state", "dtype", "card", "torch", "triton",
)  # fmt: skip
#: what makes a row the same row
KEY = (*FIELDS[: FIELDS.index("median_us")], "dtype", "card")
#: batch, heads, head size
SHAPES = ((1, 50, 32), (1, 32, 128), (1, 32, 64), (8, 32, 128))
KEYS = tuple(2**n for n in range(10, 17))
PARTS = (1, 2, 4, 8, 16, 32, 64)
TORCH = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
RULE = "ours, rule"
#: keys and values that a graph walks, in bytes: several times what an H200 caches
WALKED = 2**28
REPLAYS = 15


@dataclass(frozen=True)
class Case:
    """One query (batch, heads, 1, d), and keys and values of several layers."""

    q: Tensor
    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def make(cls, batch: int, heads: int, d: int, keys: int, options: argparse.Namespace) -> Case:
        kind = {"device": options.device, "dtype": getattr(torch, options.dtype)}
        size = batch * heads * keys * d
        bytes_ = 2 * size * torch.empty(0, dtype=kind["dtype"]).element_size()
        layers = 1 if options.tiny else max(1, min(64, -(-WALKED // bytes_)))
        made = [torch.randn(2, batch, heads, keys, d, **kind).unbind(0) for _ in range(layers)]
        return cls(torch.randn(batch, heads, 1, d, **kind), made)

    def bias(self, name: str) -> ScoreBias | None:
        heads = self.q.shape[-3]
        if name == "none":
            return None
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=self.q.device) / heads)
        return ScoreBias((Alibi(slopes=slopes),), heads)

    def error(self, out: Tensor, bias: ScoreBias | None) -> float:
        """Of the first entry and two heads, relative to the largest number."""
        two = slice(0, 2)
        q, k, v = (x[:1, two].double() for x in (self.q, *self.layers[0]))
        own = None if bias is None else bias.select_heads([0, 1])
        truth = flashbias_attention(q, k, v, own, causal=own is not None, backend="eager")
        return float((out[:1, two] - truth).abs().max() / truth.abs().max())

    def parts_of_rule(self) -> int:
        k, v = self.layers[0]
        given = {"q": self.q, "k": k, "v": v}
        return launch.parts_for(GroupSpec(None), given, self.q.shape[0] * self.q.shape[1])


Call = Callable[[Tensor, Tensor], Tensor]
Way = tuple[str, int | str, Call, Any]


def ways(case: Case, bias: ScoreBias | None, parts: tuple[int, ...]) -> Iterator[Way]:
    """Name, parts, the call for the keys and values of a layer, and what it runs in."""
    prepared = None if bias is None else PreparedBias(bias)

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return flashbias_attention(
            case.q, k, v, prepared, causal=bias is not None, backend="triton"
        )

    yield RULE, case.parts_of_rule(), ours, contextlib.nullcontext()
    for count in parts:
        yield "ours", count, ours, launch.split_into(count)
    if bias is None:
        for name, backend in TORCH.items():

            def theirs(k: Tensor, v: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(case.q, k, v)

            yield f"{name}, no bias", "", theirs, sdpa_kernel(backend)


def on_card(case: Case, call: Call) -> list[float]:
    """Microseconds of a call, from replays of a graph over all layers."""
    rounds = max(1, 8 // len(case.layers))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for k, v in case.layers:
                call(k, v)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    calls = rounds * len(case.layers)
    return [1e3 * a.elapsed_time(b) / calls for a, b in itertools.pairwise(marks)]


def on_clock(case: Case, call: Call) -> list[float]:
    start = time.perf_counter()
    call(*case.layers[0])
    return [1e6 * (time.perf_counter() - start)]


def measured(case: Case, bias: ScoreBias | None, call: Call, context: Any) -> dict[str, Any] | None:
    """Times and error of one way; one that fails is a row, but where others had the memory."""
    try:
        with context:
            error = case.error(call(*case.layers[0]), bias)  # compiles, too
            times = (on_card if case.q.is_cuda else on_clock)(case, call)
    except Exception as problem:
        if lacked_beside_others(problem):
            print(no_row("a way", problem), flush=True)
            return None
        text = f"{type(problem).__name__}: {problem}".splitlines()[0][:120]
        return {"state": text}
    low, middle, high = (
        statistics.quantiles(times, n=10, method="inclusive")[i] if len(times) > 1 else times[0]
        for i in (1, 4, 7)
    )
    k, _ = case.layers[0]
    speed = 2 * k.numel() * k.element_size() / middle / 1e3
    return {
        "median_us": f"{middle:.2f}", "p20_us": f"{low:.2f}", "p80_us": f"{high:.2f}",
        "gb_per_s": f"{speed:.0f}", "error": f"{error:.2e}", "state": "ok",
    }  # fmt: skip


def told(rows: list[dict[str, str]]) -> Iterator[str]:
    """For each call: the rule beside one part, the best number of parts, and torch."""
    sizes = ("batch", "heads", "d", "keys")
    good = [row for row in rows if row["state"] == "ok"]
    for own in (r for r in good if r["way"] == RULE):
        same = [r for r in good if all(r[n] == own[n] for n in sizes)]
        ours = {r["parts"]: float(r["median_us"]) for r in same
                if r["way"] == "ours" and r["bias"] == own["bias"]}  # fmt: skip
        if not ours:
            continue
        best = min(ours, key=lambda parts: ours[parts])
        theirs = [f"{r['way']} {r['median_us']}" for r in same if "no bias" in r["way"]]
        whole = f", one part {ours['1']:.2f}" if "1" in ours else ""
        yield (
            f"{' x '.join(own[n] for n in sizes)} {own['bias']}: {own['median_us']} us with "
            f"{own['parts']} parts{whole}, best {ours[best]:.2f} with {best}"
            f"{''.join(f'; {x}' for x in theirs)}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--biases", nargs="*", default=["none", "alibi"])
    parser.add_argument("--keys", type=int, nargs="*", default=list(KEYS))
    parser.add_argument("--stop-s", type=float, default=80.0, help="begin no row after; 0: none")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/tune_parts.csv")
    return parser.parse_args()


def machine(device: str, dtype: str) -> dict[str, str]:
    """Where the times were taken."""
    import triton

    card = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"dtype": dtype, "card": card, **versions}


def measure_bias(
    case: Case, about: dict[str, Any], parts: tuple[int, ...], table: RowFile, ends: float
) -> None:
    """The rows of a case and a bias that are not there yet, until it is too late.

    Raises:
        SystemExit: nothing runs on the card any more, and all that follows would fail, too.
    """
    bias = case.bias(about["bias"])
    for way, count, call, context in ways(case, bias, parts):
        row = {**about, "way": way, "parts": count}
        if table.find(row) is not None:
            continue
        if time.monotonic() > ends:
            print(f"stopped before {row}")
            return
        found = measured(case, bias, call, context)
        if found is not None and is_lost(table.add(row | found)["state"]):
            raise SystemExit(f"{row}: {found['state']}")


@torch.inference_mode()
@alone()
def main() -> None:
    """Measure, print and write."""
    options, started = arguments(), time.monotonic()
    shapes, keys, parts = SHAPES, options.keys, PARTS
    if options.tiny:
        shapes, keys, parts = ((1, 2, 16),), [70], (1, 2)
    where = machine(options.device, options.dtype)
    table = RowFile(
        options.output, FIELDS, key=KEY, versions=("torch", "triton"), resume=options.resume
    )
    torch.manual_seed(0)
    ends = started + options.stop_s if options.stop_s else math.inf
    for (batch, heads, d), m in ((shape, m) for shape in shapes for m in keys):
        case = Case.make(batch, heads, d, m, options)
        about = {"batch": batch, "heads": heads, "d": d, "keys": m, **where}
        for name in options.biases:
            measure_bias(case, about | {"bias": name}, parts, table, ends)
        del case
    for sentence in told(table.of(where)):
        print(sentence)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
