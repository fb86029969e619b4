"""Make the table of launch settings of what was measured on a card.

python scripts/make_launch_table.py [--measured FILE.csv ...] [--check | --confirm] [--output FILE]

`scripts/tune_attention.py` has measured settings at shapes. For each class of shapes of
`flashbias_convert/attention/launch_table.csv` that has some of them, settings that ran at all of
these are compared by the geometric mean of their times, beside the fastest of each shape; those
that the table has stay where nothing is 1 % faster. Classes, and their order, are the table's. No
card is needed. With --check the table is not written, and what would change makes the exit code 1.
With --confirm no settings change: only whether measurements agree with them is written.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import torch
from attention_launches import launched
from attention_shapes import SHAPES, SHORT

from flashbias_convert.attention import PreparedBias, group_calls
from flashbias_convert.attention.arguments import check_arguments
from flashbias_convert.attention.launch_table import TABLE, Entry, entry_of, parse_table
from flashbias_convert.attention.operator import triton_attention
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts/results"
MEASURED = (RESULTS / "tuning.csv", RESULTS / "tune_entries.csv")
#: other settings must be so many times as fast
WORTH = 1.01
#: milliseconds by shape and settings
Times = dict[str, dict[LaunchSettings, float]]


def shape_of(name: str) -> LaunchShape:
    """What the settings of a shape's launch depend on."""
    shape = (SHAPES | SHORT)[name]
    q, k, v = shape.unset(torch.bfloat16)
    bias = None if shape.bias is None else PreparedBias(shape.bias(shape, torch.device("cpu")))
    call = {"scale": None, "causal": False, "query_start": None, "key_mask": None, "cosine": False}
    arguments = check_arguments(q, k, v, **{**call, **shape.options})
    with mock.patch.object(group_calls, "normalize_rows", lambda rows: rows):
        return launched(lambda: triton_attention(q, k, v, bias, arguments))[0]


def read_times(paths: Sequence[Path]) -> tuple[Times, dict[str, str]]:
    """Times of all rows that have one, and the card of each shape; later files replace shapes."""
    times: Times = {}
    cards: dict[str, str] = {}
    for path in paths:
        found: Times = {}
        for row in csv.DictReader(path.open(newline="")):
            if row.get("state", "ok") == "ok" and row["ms"]:
                found.setdefault(row["shape"], {})[_settings(row)] = float(row["ms"])
                cards[row["shape"]] = row["card"]
        times |= found
    return times, cards


def _settings(row: Mapping[str, str]) -> LaunchSettings:
    given = {f.name: row.get(f.name) for f in dataclasses.fields(LaunchSettings)}
    numbers = {name: int(text) for name, text in given.items() if text}
    return LaunchSettings(**numbers)


def best(now: LaunchSettings, times: Sequence[Mapping[LaunchSettings, float]]) -> LaunchSettings:
    """Settings of a class, of the times at its shapes; those of now, if nothing is better."""
    common = set.intersection(*(set(each) for each in times))
    if not common:
        return now

    def mean(settings: LaunchSettings) -> float:
        ratios = [each[settings] / min(each.values()) for each in times]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    first = min(common, key=mean)
    return now if now in common and mean(now) <= WORTH * mean(first) else first


def made(entries: Sequence[Entry], times: Times, cards: Mapping[str, str]) -> list[Entry]:
    """The rows of the table, with settings and shapes that were measured."""
    of_class: dict[str, list[str]] = {}
    for name in times:
        of_class.setdefault(entry_of(shape_of(name), entries).of.name, []).append(name)
    found = []
    for entry in entries:
        names = of_class.get(entry.of.name, [])
        if names:
            settings = best(entry.settings, [times[name] for name in names])
            card = ", ".join(dict.fromkeys(cards[name] for name in names))
            entry = dataclasses.replace(entry, settings=settings, measured=tuple(names), card=card)
        found.append(entry)
    return found


def confirmed(before: Sequence[Entry], after: Sequence[Entry]) -> list[Entry]:
    """The rows of before, told to be measured where those of after have the same settings."""
    return [
        new if new.settings == old.settings else dataclasses.replace(old, measured=(), card="")
        for old, new in zip(before, after, strict=True)
    ]


def written(text: str, entries: Sequence[Entry]) -> str:
    """A table of this text with settings, shapes and cards of these rows."""
    rows = list(csv.DictReader(io.StringIO(text)))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row, entry in zip(rows, entries, strict=True):
        numbers = dataclasses.asdict(entry.settings)
        own = {name: "" if number is None else str(number) for name, number in numbers.items()}
        writer.writerow({**row, **own, "measured": "; ".join(entry.measured), "card": entry.card})
    return out.getvalue()


def main() -> None:
    """Read, choose, tell and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, nargs="+", default=list(MEASURED))
    parser.add_argument("--output", type=Path, default=Path(str(TABLE)))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing")
    what.add_argument("--confirm", action="store_true", help="change no settings")
    options = parser.parse_args()
    text = options.output.read_text("utf-8")
    before = parse_table(text)
    after = made(before, *read_times(options.measured))
    for old, new in zip(before, after, strict=True):
        if old.settings != new.settings:
            print(f"{new.of.name} ({'; '.join(new.measured)}): {old.settings} -> {new.settings}")
    changed = any(old.settings != new.settings for old, new in zip(before, after, strict=True))
    if options.check:
        raise SystemExit(1 if changed else 0)
    kept = confirmed(before, after) if options.confirm else after
    options.output.write_text(written(text, kept), "utf-8")


if __name__ == "__main__":
    main()
