"""Figures "Non-causal attention speed" and "Causal attention speed", inference.

python scripts/paper/attention_speed.py [--lengths 1024 4096 ...] [--kernel FILE.py] [--resume]

Non-causal: 4 heads of 32, batch 2, a bias of rank 8. Causal: 50 heads of 32, batch 1, ALiBi. And
that of the main text: 8 heads of 16, rank 8. The figures have no numbers in print, only what the
text says of them. Measured as `bench_lengths.py` does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import row_file
from bench_lengths import ROOT, SERIES, measure, parsed

LENGTHS = tuple(2**n for n in range(10, 17))
#: what the paper says, of an A100
PAPER = {
    "non-causal": "over 2 times as fast as the best other",
    "causal": "1.75 times as fast as the best other",
}


def table(rows: Sequence[row_file.Row]) -> str:
    """Ours beside the best others, by series and length, in Markdown."""
    lines = [
        "| attention | tokens | ours, ms | best other with the bias | best without any |"
        " ours, MiB | matrix of the others, MiB | the paper, A100 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, series in SERIES.items():
        own = [row for row in rows if row["series"] == name]
        for n in sorted({int(row["n"]) for row in own}):
            found = {r["peer"]: r for r in own if int(r["n"]) == n and r["state"] == "ok"}
            if "ours" not in found:
                continue
            ours = found.pop("ours")
            tried = " ".join(r["peer"] for r in own if int(r["n"]) == n)
            others = [r for r in found.values() if not r["peer"].startswith("ours")]
            cells = (
                series.title,
                f"{n:,}",
                f"{float(ours['median_ms']):.3g}",
                _best(ours, [r for r in others if r["has_bias"] == "1"], "dense" in tried),
                _best(ours, [r for r in others if r["has_bias"] == "0"]),
                ours["memory_mib"],
                f"{series.heads * n * n * 2 / 2**20:,.0f}",
                PAPER.get(name, ""),
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _best(ours: row_file.Row, others: Sequence[row_file.Row], tried: bool = True) -> str:
    """How many times as long as ours the fastest takes, and who that is."""
    if not others:
        return "none" if tried else "not measured"
    least = min(others, key=lambda row: float(row["median_ms"]))
    return f"{float(least['median_ms']) / float(ours['median_ms']):.2f}x ({least['peer']})"


def main() -> None:
    """Measure, draw, and write the table."""
    output = ROOT / "scripts/results/paper/attention_speed.csv"
    series = ("heads of 16", "non-causal", "causal")
    options = parsed((__doc__ or "").splitlines()[0], series, LENGTHS, output)
    measure(options.series, options.lengths, options.kernel, options.output, options.resume)
    made = table(row_file.read(options.output))
    options.output.with_suffix(".md").write_text(made)
    print(made)


if __name__ == "__main__":
    main()
