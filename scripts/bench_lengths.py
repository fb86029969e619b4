"""Time and memory of attention with a bias of rank 16 against the number of tokens.

python scripts/bench_lengths.py [--lengths 256 1024 ...] [--output FILE.csv]

One sequence, 8 heads of 64, bf16, forward: the plain shape of `bench_attention.py` at every length,
with the same peers. Memory is everything beyond q, k and v: the bias in the form that the peer
takes, and what a call allocates, its result included. A peer for which the card has not enough
memory is marked so. Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
from attention_peers import peers
from attention_shapes import Shape, low_rank
from bench_attention import DEVICE, row
from torch import Tensor

from flashbias_convert.benchmark.calls import AttentionCall

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = tuple(2**n for n in range(8, 17))
FIELDS = (
    "n", "peer", "has_bias", "median_ms", "p20_ms", "p80_ms", "call_ms", "memory_mib", "error",
    "state", "card", "torch", "triton",
)  # fmt: skip
OUT_OF_MEMORY = "out of memory"
COLOURS = {
    "ours": "black",
    "ours, sdpa path": "#7b4fa3",
    "flash, no bias": "#bbbbbb",
    "cudnn, no bias": "#888888",
    "efficient, dense": "#f2b134",
    "cudnn, dense": "#ed553b",
    "flex, dense": "#3caea3",
}


def dense(call: AttentionCall) -> Tensor:
    """(H, N, M) in bf16, made head by head: only the result has to fit."""
    heads, n, m = call.q.shape[-3], call.q.shape[-2], call.k.shape[-2]
    out = torch.empty(heads, n, m, dtype=call.q.dtype, device=call.q.device)
    for h in range(heads):
        out[h] = call.bias.select_heads([h]).dense(n, m)[0]
    return out


def bench_length(n: int) -> list[dict[str, Any]]:
    """All peers at one length."""
    shape = Shape((1,), 8, n, 64, low_rank(16))
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.bfloat16, DEVICE)
    before = torch.cuda.memory_allocated()
    assert shape.bias is not None
    bias = shape.bias(shape, DEVICE)
    own = torch.cuda.memory_allocated() - before
    found = []
    for peer in peers(shape, q, k, v, bias, dense=dense):
        told = row(peer, shape, q, k, v, bias)
        held, peak = told.pop("held_mib", None), told.pop("peak_mib", None)
        if peak is not None:
            factors = own / 2**20 if "ours" in peer.name else 0.0
            told["memory_mib"] = f"{float(peak) + float(held) + factors:.2f}"
        found.append({"n": n, **told})
        torch.cuda.empty_cache()
    return found


def draw(file: Path) -> None:
    """Write FILE.png beside FILE.csv."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for peer, colour in COLOURS.items():
        own = [r for r in rows if r["peer"] == peer and r["state"] == "ok"]
        style = {"color": colour, "label": peer, "marker": "o", "markersize": 3.5}
        width = 2.2 if peer == "ours" else 1.2
        for axes, name in ((left, "median_ms"), (right, "memory_mib")):
            found = [(int(r["n"]), float(r[name])) for r in own]
            axes.plot(*zip(*found, strict=True) if found else ((), ()), linewidth=width, **style)
        lost = [int(r["n"]) for r in rows if r["peer"] == peer and r["state"] == OUT_OF_MEMORY]
        for axes in (left, right):  # at the top of the picture
            axes.plot(lost, [0.97] * len(lost), "x", color=colour, markersize=8,
                      transform=axes.get_xaxis_transform())  # fmt: skip
    for axes, label in ((left, "time of a call (ms)"), (right, "memory beside q, k, v (MiB)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    lost_any = any(r["state"] == OUT_OF_MEMORY for r in rows)
    note = "; x: out of memory" if lost_any else ""
    figure.suptitle(f"8 heads of 64, bias of rank 16, forward, bf16, {rows[0]['card']}{note}")
    figure.savefig(file.with_suffix(".png"), dpi=130)


def main() -> None:
    """Measure every length; print and write a table and a picture."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_lengths.csv")
    options = parser.parse_args()
    machine = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for n in options.lengths:
            for found in bench_length(n):
                writer.writerow({**found, **machine})
                file.flush()
                shown = [found.get(x, "-") for x in ("median_ms", "memory_mib", "error")]
                print(f"{n:6d} {found['peer']:20s}", *shown, found["state"], flush=True)
    draw(options.output)


if __name__ == "__main__":
    main()
