"""Markdown and picture of `bench_training.py`, the paper's numbers beside ours.

python scripts/training_figure.py [FILE.csv]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS, NO_BIAS = "flashbias", "no bias, SDPA"
COLOURS = {OURS: "black", NO_BIAS: "#bbbbbb", "dense bias, SDPA": "#ed553b",
           "FlexAttention": "#3caea3"}  # fmt: skip
#: seconds of 100 training steps of GPT-2 at 2,048 tokens on an A100 (FlashBias, table "Experiment
#: of GPT-2"); it does not say of which batch, so differences and ratios compare, seconds do not
PAPER_GPT2 = {NO_BIAS: 119.3, "dense bias, SDPA": 124.3, OURS: 121.6, "FlexAttention": 122.4}
#: what the text says of the plain Transformer at 16,384 tokens; its curves have no numbers
PAPER_PLAIN = (
    "The paper, on an A100 at 16,384 tokens: a fifth of the memory of FlexAttention and of "
    "FlashAttention with the bias, and 18.6% faster than the latter."
)
Row = dict[str, Any]
#: rows of one setting belong into one table
SETTING = ("model", "layers", "channels", "heads", "batch", "learnable", "checkpoint", "compile",
           "dtype", "device")  # fmt: skip


def settings(file: Path) -> dict[tuple[str, ...], list[Row]]:
    """The newest rows of each setting, attention and length."""
    with file.open(newline="") as lines:
        rows = {(*_setting(r), r["attention"], r["tokens"]): r for r in csv.DictReader(lines)}
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows.values():
        found.setdefault(_setting(row), []).append(row)
    return found


def _setting(row: Row) -> tuple[str, ...]:
    # a process that died did not say on which card
    return tuple("" if name == "device" and row["status"] == "crashed" else row[name]
                 for name in SETTING[:-1])  # fmt: skip


def tables(file: Path) -> str:
    """Markdown: a table for each setting."""
    out = []
    for rows in settings(file).values():
        out += _table(rows)
    return "\n".join(out) + "\n"


def _table(rows: list[Row]) -> list[str]:
    first = rows[0]
    words = [f"{first['layers']} layers of {first['channels']} channels, {first['heads']} heads",
             f"batch {first['batch']}", first["dtype"]]  # fmt: skip
    words += ["bias trained"] if first["learnable"] == "True" else []
    words += [x for x in ("checkpoint", "compile") if first[x] == "True"]
    gpt2 = first["model"] == "gpt2"
    device = next((r["device"] for r in rows if r["device"]), "")
    out = [f"**{first['model']}**: {', '.join(words)}; {device}", ""]
    paper = ["paper, A100: s per 100 steps", "paper: over no bias"] if gpt2 else []
    head = ["tokens", "attention", "s per 100 steps", "over no bias", "GiB", "gradient error"]
    out += [f"| {' | '.join(head + paper)} |", "|" + "---|" * len(head + paper)]
    base = {r["tokens"]: float(r["s_per_100"]) for r in rows
            if r["attention"] == NO_BIAS and r["s_per_100"]}  # fmt: skip
    for r in sorted(rows, key=lambda r: (int(r["tokens"]), list(COLOURS).index(r["attention"]))):
        out.append(f"| {' | '.join(_cells(r, base.get(r['tokens']), gpt2))} |")
    return [*out, "", *([] if gpt2 else [PAPER_PLAIN, ""])]


def _cells(row: Row, base: float | None, gpt2: bool) -> list[str]:
    seconds = float(row["s_per_100"]) if row["s_per_100"] else None
    cells = [f"{int(row['tokens']):,}", row["attention"]]
    if seconds is None:
        cells += [row["status"], "", "", ""]
    else:
        mark = "" if row["status"] == "ok" else f" ({row['status']})"
        ratio = "" if base is None else f"{seconds - base:+.2f} s, {seconds / base:.3f}x"
        memory = f"{float(row['peak_mib']) / 1024:.2f}" if row["peak_mib"] else ""
        cells += [f"{seconds:.2f}{mark}", ratio, memory, row["error_gradient"]]
    if gpt2:
        known = PAPER_GPT2[row["attention"]] if row["tokens"] == "2048" else None
        over = None if known is None else known - PAPER_GPT2[NO_BIAS]
        cells += ["", ""] if known is None else [
            f"{known}", f"{over:+.1f} s, {known / PAPER_GPT2[NO_BIAS]:.3f}x"]  # fmt: skip
    return cells


def draw(file: Path) -> None:
    """Write FILE.md and FILE.png beside FILE.csv."""
    file.with_suffix(".md").write_text(tables(file))
    print(tables(file))
    groups = [g for g in settings(file).values() if any(r["s_per_100"] for r in g)]
    if not groups:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (10, 3.8 * len(groups))
    figure, axes = plt.subplots(len(groups), 2, figsize=size, squeeze=False, layout="constrained")
    for line, rows in zip(axes, groups, strict=True):
        for panel, name, label in ((line[0], "median_ms", "ms of a step"),
                                   (line[1], "peak_mib", "MiB, everything")):  # fmt: skip
            _panel(panel, rows, name, label)
        first = rows[0]
        note = "bias trained" if first["learnable"] == "True" else "bias frozen"
        line[0].set_title(f"{first['model']}, {first['layers']} layers, {note}", fontsize=9)
        line[1].set_title(next((r["device"] for r in rows if r["device"]), ""), fontsize=9)
    axes[0][0].legend(fontsize=7)
    figure.savefig(file.with_suffix(".png"), dpi=130)


def _panel(panel: Any, rows: list[Row], name: str, label: str) -> None:
    for i, (attention, colour) in enumerate(COLOURS.items()):
        own = [r for r in rows if r["attention"] == attention]
        fine = sorted((int(r["tokens"]), float(r[name])) for r in own
                      if r["status"] == "ok" and r[name])  # fmt: skip
        panel.plot(*zip(*fine, strict=True) if fine else ((), ()), marker="o", markersize=3.5,
                   color=colour, label=attention)  # fmt: skip
        for r in own:  # at the top of the picture, below each other
            if r["status"] != "ok":
                panel.plot(int(r["tokens"]), 0.96 - 0.05 * i, "x", color=colour,
                           transform=panel.get_xaxis_transform())  # fmt: skip
    panel.set_xscale("log", base=2)
    if any(r[name] for r in rows):
        panel.set_yscale("log")
    panel.set(xlabel="tokens (x: no memory, or failed)", ylabel=label)
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scripts/results/bench_training.csv")
