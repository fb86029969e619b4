"""Rows to a file, one by one: a run that is cut keeps what it has."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

COLUMNS = (
    "model", "variant", "what", "mode", "batch", "tokens", "status", "reason",
    "median_ms", "p20_ms", "p80_ms", "repeats", "replay_ms", "per_second", "peak_mib", "bias_mib",
    "first_call_s", "prepare_s", "graphs", "graph_breaks", "cudagraph_skips",
    "error_max", "error_rms", "rounding_max", "rounding_rms", "within_rounding", "largest", "truth",
    "dtype", "device", "torch", "triton", "timm", "transformers",
)  # fmt: skip


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What a row says about where it was measured."""
    from flashbias_convert.inspection import library_versions

    versions = library_versions()
    names = ("torch", "triton", "timm", "transformers")
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = {name: versions.get(name, "") for name in names}
    return {"dtype": str(dtype).removeprefix("torch."), "device": card, **known}


class Table:
    """A CSV file of rows.

    Args:
        path: of the file; its folder is made.
        more: columns besides `COLUMNS`.
        resume: keep the rows of a file that is there, and add to them.
        begin: write the file anew, with the rows that are kept; False: it is there.

    Attributes:
        rows: all rows, those that were there before included.
    """

    def __init__(
        self, path: Path, more: Iterable[str] = (), *, resume: bool = False, begin: bool = True
    ) -> None:
        self.path, self.columns = path, (*COLUMNS, *more)
        self.rows = read_rows(path) if resume and path.is_file() else []
        if not begin:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def read(self) -> None:
        """Take the rows that other processes have added."""
        self.rows = read_rows(self.path)

    def has(self, model: str, variant: str, device: str) -> bool:
        """Whether there is such a row from the same kind of card."""
        wanted = (model, variant, device)
        return any((r["model"], r["variant"], r["device"]) == wanted for r in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Write a row at once."""
        text = {name: str(row.get(name, "")) for name in self.columns}
        self.rows.append(text)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(text)
        print(told(text), flush=True)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def told(row: dict[str, str]) -> str:
    """A row in a line."""
    start = f"{row['model']:34s} {row['variant']:20s}"
    if not row["median_ms"]:
        return f"{start} {row['status']}: {row['reason']}"
    error = f"error {row['error_rms']} (rounding {row['rounding_rms']})" if row["error_rms"] else ""
    return (
        f"{start} {float(row['median_ms']):10.3f} ms {row['peak_mib']:>9s} MiB "
        f"biases {row['bias_mib']:>8s} MiB  first {row['first_call_s']} s  {error} "
        f"{row['reason']}"
    )


def is_right(row: dict[str, str]) -> bool:
    """Whether a row has a time that others may be compared with."""
    return bool(row["median_ms"]) and row["status"] != "wrong"


def _without_ratios(row: dict[str, str]) -> str:
    ms = row["median_ms"]
    return f"({float(ms):.3f}: {row['reason']})" if ms else row["reason"]


def summary(rows: list[dict[str, str]], references: tuple[str, ...]) -> str:
    """A table in Markdown: times and memory, and how many times as fast as some variants.

    Args:
        rows: of one table; those with wrong outputs have no ratios, nor are others compared with
            them.
        references: variants to compare with.
    """
    times = {(r["model"], r["variant"]): float(r["median_ms"]) for r in rows if is_right(r)}
    titles = ["model", "variant", "ms", "MiB", *(f"x {name}" for name in references), "error rms",
              "rounding rms"]  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        own = times.get((row["model"], row["variant"]))
        ratios = [
            f"{times[row['model'], name] / own:.2f}"
            if own and (row["model"], name) in times
            else ""
            for name in references
        ]
        shown = f"{own:.3f}" if own else _without_ratios(row)
        cells = [row["model"], row["variant"], shown, row["peak_mib"], *ratios,
                 row["error_rms"], row["rounding_rms"]]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
