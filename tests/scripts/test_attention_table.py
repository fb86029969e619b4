"""The README's table of attention is what the committed measurements give."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from attention_table import table
from bench_attention import FIELDS, ROOT


def test_the_readme_has_this_table() -> None:
    made = table(ROOT / "scripts/results/bench_attention.csv")
    assert made in (ROOT / "README.md").read_text("utf-8")


def test_wrong_peers_and_cosine_without_a_bias_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "attention.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, restval="")
        writer.writeheader()
        for shape in ("swinv2b-s3 R=16", "swinv2b-s3 R=16 cosine"):
            for peer, has_bias, ms, state in (
                ("ours", 1, 2.0, "ok"), ("ours, sdpa path", 1, 1.0, "ok"),
                ("cudnn, dense", 1, 1.5, "wrong"), ("flex, dense", 1, 5.0, "ok"),
                ("flex, dense, tuned", 1, 4.0, "ok"), ("flash, no bias", 0, 3.0, "ok"),
            ):  # fmt: skip
                writer.writerow({"shape": shape, "peer": peer, "has_bias": has_bias,
                                 "median_ms": ms, "state": state})  # fmt: skip
    rows = [line.split(" | ")[1:] for line in table(path).splitlines()[2:]]
    assert rows == [
        ["2.000 ms", "2.00x (flex tuned)", "1.50x (flash) |"],
        ["2.000 ms", "2.00x (flex tuned)", " |"],
    ]
