"""The table of `bench_attention.py` for the README, as markdown.

python scripts/attention_table.py [FILE.csv]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = "ours"
#: shown by their size: (batch, heads, N, D) and what is added
WORDS = {
    "swinv2b-s3 R=16": "SwinV2-B stage 3 (64, 16, 576, 32), rank 16",
    "swinv2b-s3 R=32": "the same, rank 32",
    "swinv2b-s3 R=16 cosine": "the same with cosine attention, rank 16",
    "swinv2b-s3 table cosine": "the same, exact table",
    "swinv2b-s3 dense cosine": "the same, dense",
    "swinv2b-s1 shift R=16 cosine": "SwinV2-B stage 1 (1024, 4, 576, 32), shift mask, cosine",
    "pangu R=64": "Pangu-Weather (1024, 6, 144, 32), rank 64",
    "pangu dense": "the same, dense",
    "plain R=16": "plain (1, 8, 8192, 64), rank 16",
    "non-causal R=16": "long (2, 4, 16384, 32), rank 16",
    "pde R=16": "PDE solver (1, 8, 32186, 16), rank 16",
    "triangle dense": "triangle (1218, 4, 1218, 32), dense",
    "triangle R=32": "the same, rank 32",
    "t5 table": "T5 (8, 12, 512, 64), exact table",
    "t5 dense": "the same, dense",
    "beit-l 512 table": "BEiT-L (16, 16, 1025, 64), exact table",
    "sam-b global axial": "SAM-B global (4, 12, 4096, 64), axial",
    "alibi gpt2": "ALiBi GPT-2 (8, 25, 2048, 64), causal",
    "alibi D=32": "ALiBi (1, 50, 8192, 32), causal",
    "decode alibi": "ALiBi, decoding (64, 32, 1 query x 4096 keys, 64)",
    "d128 R=16": "(4, 16, 4096, 128), rank 16",
}


def table(file: Path) -> str:
    """Markdown: our time, and how many times as long the best correct peers take."""
    with file.open(newline="") as lines:
        rows = [r for r in csv.DictReader(lines) if r["state"] == "ok"]
    out = ["| attention | ours | best other with the bias | best without any bias |"]
    out.append("|---|---|---|---|")
    for shape, words in WORDS.items():
        own = [r for r in rows if r["shape"] == shape]
        ours = next((float(r["median_ms"]) for r in own if r["peer"] == OURS), None)
        if ours is None:
            continue
        cells = [f"{ours:.3f} ms"]
        for has_bias in ("1", "0"):
            if has_bias == "0" and "cosine" in shape:
                cells.append("")  # these peers normalise q and k in steps of their own
                continue
            others = [r for r in own if r["has_bias"] == has_bias and OURS not in r["peer"]]
            best = min(others, key=lambda r: float(r["median_ms"]))
            name = best["peer"].split(",")[0] + (" tuned" if "tuned" in best["peer"] else "")
            cells.append(f"{float(best['median_ms']) / ours:.2f}x ({name})")
        out.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(out)


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scripts/results/bench_attention.csv"
    print(table(path))
