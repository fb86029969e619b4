"""The table of PDE solvers in the paper's shape, its numbers beside ours, and a picture.

python scripts/paper/pde_table.py [FILE.csv]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OURS, ANY_ORDER = "flashbias", "flashbias, any order"
PHASES = ("training", "inference")
#: GB and seconds of 100 iterations at batch 1 on an A100 (FlashBias, the table of PDE solvers)
PAPER_SIZES = (8192, 16384, 32186)
PAPER = {
    "FlashAttention": ("12.8 / 15.4", "OOM", "OOM", "4.54 / 5.46", "15.3 / 21.2", "OOM"),
    "FlexAttention": (*3 * ("not supported",), "21.9 / 184.0", "OOM", "OOM"),
    "FlashBias": ("1.46 / 4.54", "2.02 / 14.7", "2.97 / 51.1", "0.98 / 1.22", "1.03 / 3.48",
                  "1.13 / 12.7"),
}  # fmt: skip
Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The rows, the newest of each."""
    with file.open(newline="") as lines:
        rows = {(r["peer"], r["points"], r["phase"]): r for r in csv.DictReader(lines)}
    return list(rows.values())


def cell(row: Row | None) -> str:
    """GiB and seconds of 100 iterations, or why there are none."""
    if row is None:
        return ""
    if row["status"] != "ok":
        return "OOM" if row["status"] == "out of memory" else row["status"].split(":")[0]
    memory = f"{float(row['peak_mib']) / 1024:.2f}" if row["peak_mib"] else "-"
    wrong = " (wrong)" if row["correct"] == "False" else ""
    return f"{memory} / {float(row['s_per_100']):.2f}{wrong}"


def columns(rows: list[Row]) -> list[tuple[str, int]]:
    """Phases and numbers of points."""
    sizes = sorted({int(r["points"]) for r in rows})
    return [(phase, n) for phase in PHASES for n in sizes]


def cells(rows: list[Row]) -> dict[str, list[str]]:
    """By name of a method, ours first, then the paper's."""
    known = {(r["peer"], r["phase"], int(r["points"])): r for r in rows}
    found = {
        peer: [cell(known.get((peer, *column))) for column in columns(rows)]
        for peer in dict.fromkeys(r["peer"] for r in rows)
    }
    paper = [(phase, n) for phase in PHASES for n in PAPER_SIZES]
    for name, values in PAPER.items():
        own = dict(zip(paper, values, strict=True))
        found[f"paper, A100: {name}"] = [own.get(c, "") for c in columns(rows)]
    return found


def ratios(rows: list[Row]) -> list[str]:
    """How many times as long as ours the best correct peer takes, column by column."""
    found = []
    for phase, n in columns(rows):
        own = [r for r in rows if (r["phase"], int(r["points"])) == (phase, n)]
        fine = [r for r in own if r["status"] == "ok" and r["correct"] == "True"]
        ours = next((r for r in fine if r["peer"] == OURS), None)
        others = [r for r in fine if r["peer"] not in (OURS, ANY_ORDER)]
        if ours is None or not others:
            found.append("")
            continue
        best = min(others, key=lambda r: float(r["median_ms"]))
        ratio = float(best["median_ms"]) / float(ours["median_ms"])
        found.append(f"{ratio:.2f}x ({best['peer']})")
    return found


def markdown(rows: list[Row]) -> str:
    """The table."""
    head = [f"{phase}, N = {n:,}" for phase, n in columns(rows)]
    out = ["GiB (the paper: GB) / seconds of 100 iterations at batch 1; "
           f"{rows[0]['layers']} layers, {rows[0]['dtype']}, {rows[0]['device']}.", ""]  # fmt: skip
    out += [f"| method | {' | '.join(head)} |", "|" + "---|" * (len(head) + 1)]
    for name, values in {**cells(rows), "best correct peer over ours": ratios(rows)}.items():
        out.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(out) + "\n"


def draw(file: Path) -> None:
    """Write the table as FILE_table.csv and FILE.md, and FILE.png, beside FILE.csv."""
    rows = read(file)
    if not rows:
        return
    file.with_suffix(".md").write_text(markdown(rows))
    print(markdown(rows))
    with file.with_name(f"{file.stem}_table.csv").open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(["method", *(f"{phase} {n}" for phase, n in columns(rows))])
        writer.writerows([name, *values] for name, values in cells(rows).items())
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    for line, (name, label) in zip(
        axes, (("s_per_100", "seconds of 100"), ("peak_mib", "MiB, everything")), strict=True
    ):
        for panel, phase in zip(line, PHASES, strict=True):
            _panel(panel, [r for r in rows if r["phase"] == phase], name)
            panel.set(title=phase, xlabel="points (x: no memory, or failed)", ylabel=label)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"PDE solver, {rows[0]['layers']} layers, {rows[0]['device']}")
    figure.savefig(file.with_suffix(".png"), dpi=110)


def _panel(panel: Any, rows: list[Row], name: str) -> None:
    for i, peer in enumerate(dict.fromkeys(r["peer"] for r in rows)):
        own = [r for r in rows if r["peer"] == peer]
        fine = sorted((int(r["points"]), float(r[name])) for r in own
                      if r["status"] == "ok" and r["correct"] != "False" and r[name])  # fmt: skip
        style = {"color": "black"} if peer == OURS else {"color": f"C{i}"}
        panel.plot(*zip(*fine, strict=True) if fine else ((), ()), marker="o", label=peer, **style)
        for r in own:
            if r["status"] != "ok":
                panel.plot(int(r["points"]), 0.96 - 0.05 * i, "x", **style,
                           transform=panel.get_xaxis_transform())  # fmt: skip
    if any(r[name] for r in rows):
        panel.set_yscale("log")
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    draw(given or ROOT / "scripts/results/pde_solver_speed.csv")
