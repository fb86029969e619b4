"""Time and memory of attention with a bias of rank 16 against the number of tokens.

python scripts/bench_lengths.py [--lengths 256 1024 ...] [--output FILE.csv]

One sequence, 8 heads of 64, bf16, forward: the plain shape of `bench_attention.py` at every length,
with the same peers. Memory is everything beyond q, k and v: the bias in the form that the peer
takes, and what a call allocates, its result included. A peer for which the card has not enough
memory, or that crashes, is marked so; one that lacks memory beside other commands (`beside.py`) has
no row, unless the whole card is too small. Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Collection
from pathlib import Path

import row_file
import torch
from attention_peers import peers
from attention_shapes import Shape, low_rank
from bench_attention import CRASHED, DEVICE, OUT_OF_MEMORY, machine, ready, timed
from failures import LACKED
from torch import Tensor
from turns import Wait, in_turns

from flashbias_convert.benchmark.calls import AttentionCall

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = tuple(2**n for n in range(8, 17))
FIELDS = (
    "n", "peer", "has_bias", "median_ms", "p20_ms", "p80_ms", "call_ms", "memory_mib", "error",
    "state", "card", "torch", "triton",
)  # fmt: skip
#: from here on a dense bias has 2**32 entries and more, which not every peer survives
LONG = 2**15
COLOURS = {
    "ours": "black",
    "ours, sdpa path": "#7b4fa3",
    "flash, no bias": "#bbbbbb",
    "cudnn, no bias": "#888888",
    "efficient, dense": "#f2b134",
    "cudnn, dense": "#ed553b",
    "flex, dense": "#3caea3",
}


def dense(call: AttentionCall, *, with_causal: bool = True) -> Tensor:
    """(H, N, M) in bf16, made head by head: only the result has to fit."""
    heads, n, m = call.q.shape[-3], call.q.shape[-2], call.k.shape[-2]
    out = torch.empty(heads, n, m, dtype=call.q.dtype, device=call.q.device)
    for h in range(heads):
        out[h] = call.bias.select_heads([h]).dense(n, m)[0]
    return out


def bench_length(n: int, names: Collection[str], output: Path, wait: Wait) -> None:
    """The peers of these names at one length; appends rows to `output`."""
    wait()
    shape = Shape((1,), 8, n, 64, low_rank(16))
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.bfloat16, DEVICE)
    one = torch.ones(8, 8, dtype=torch.float64, device=DEVICE)
    torch.mm(one, one)  # allocates the workspace of cuBLAS, which is no business of a peer
    before = torch.cuda.memory_allocated()
    assert shape.bias is not None
    bias = shape.bias(shape, DEVICE)
    factors = (torch.cuda.memory_allocated() - before) / 2**20
    for peer in peers(shape, q, k, v, bias, dense=dense):
        if peer.name not in names:
            continue
        told = {"n": n, **timed(*ready(peer, shape, q, k, v, bias)), **machine()}
        held, peak = told.pop("held_mib", None), told.pop("peak_mib", None)
        if held is not None and peak is not None:
            own = factors if "ours" in peer.name else 0.0
            told["memory_mib"] = f"{float(peak) + float(held) + own:.2f}"
        if told["state"] != LACKED:
            row_file.append(output, FIELDS, told)
        shown = [told.get(x, "-") for x in ("median_ms", "memory_mib", "error")]
        print(f"{n:6d} {peer.name:20s}", *shown, told["state"], flush=True)
        torch.cuda.empty_cache()


def note_lost(n: int, names: Collection[str], output: Path) -> None:
    """Rows for peers whose process died, most often of an illegal access of theirs."""
    known = _known(output)
    for name in names:
        if (n, name) not in known:
            row = {"n": n, "peer": name, "state": CRASHED, **machine()}
            row_file.append(output, FIELDS, row)


def _known(output: Path) -> set[tuple[int, str]]:
    """Lengths and peers that have a row."""
    return {(int(row["n"]), row["peer"]) for row in row_file.read(output)}


def calls(lengths: list[int], output: Path) -> list[tuple[int, tuple[str, ...], Path]]:
    """What is measured by one process each: peers with long dense biases are on their own.

    Peers that have a row are left out.
    """
    found: list[tuple[int, tuple[str, ...], Path]] = []
    known = _known(output)
    for n in lengths:
        left = [x for x in COLOURS if (n, x) not in known]
        alone = [x for x in left if "dense" in x and n >= LONG]
        found.append((n, tuple(x for x in left if x not in alone), output))
        found += [(n, (x,), output) for x in alone]
    return [call for call in found if call[1]]


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
        gone = [r for r in rows if r["peer"] == peer and r["state"] not in ("ok", "wrong")]
        for r in gone:  # at the top of the picture, below each other
            height = 0.97 - 0.04 * list(COLOURS).index(peer)
            mark = "x" if r["state"] == OUT_OF_MEMORY else "+"
            for axes in (left, right):
                axes.plot(int(r["n"]), height, mark, color=colour, markersize=8,
                          transform=axes.get_xaxis_transform())  # fmt: skip
    for axes, label in ((left, "time of a call (ms)"), (right, "memory beside q, k, v (MiB)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    lost = {r["state"] for r in rows} - {"ok", "wrong"}
    note = "; x: out of memory" if OUT_OF_MEMORY in lost else ""
    note += "; +: failed" if lost - {OUT_OF_MEMORY} else ""
    figure.suptitle(f"8 heads of 64, bias of rank 16, forward, bf16, {rows[0]['card']}{note}")
    figure.savefig(file.with_suffix(".png"), dpi=130)


def main() -> None:
    """Measure every length; print and write a table and a picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_lengths.csv")
    options = parser.parse_args()
    row_file.begin(options.output, FIELDS, resume=options.resume)
    for n, names, output in in_turns(bench_length, calls(options.lengths, options.output)):
        note_lost(n, names, output)
    draw(options.output)


if __name__ == "__main__":
    main()
