"""What the scripts of the paper's tables share: rows beside the numbers that it prints.

The paper's numbers are those of an A100 with PyTorch 2.5 and Triton 3.0 (FlashBias, NeurIPS 2025).
Its memory counts everything; ours what a call needs beyond weights and inputs. With --rows FILE...
nothing is measured: what `bench_models.py` has measured of the same models makes the table, the
picture and the passage in Markdown, on any machine.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_models import add_options
from whole_models import figure
from whole_models.case import NO_BIAS, Case, split_variant
from whole_models.running import chosen, run_apart
from whole_models.writing import Table, is_right, read_rows

#: other rows without a bias: what a bias costs is told beside the fastest
CUDNN = ("none-cudnn",)
_OWN = ("time", "delta", "ratio_to_no_bias")
_PAPER = ("paper_row", "paper_time", "paper_delta", "paper_mb", "paper_note")


@dataclass(frozen=True)
class Published:
    """A row of the paper, on an A100.

    Attributes:
        row: its name there.
        time: in the unit of the table; None if it is a figure.
        delta: difference to no bias, in the same unit.
        mb: memory.
        note: what the text says, and everything that has no column.
    """

    row: str
    time: float | None = None
    delta: float | None = None
    mb: float | None = None
    note: str = ""

    def columns(self) -> dict[str, str]:
        """As text, by the names of columns."""
        values = (self.row, self.time, self.delta, self.mb, self.note)
        return {k: "" if v is None else str(v) for k, v in zip(_PAPER, values, strict=True)}


@dataclass(frozen=True)
class PaperTable:
    """A table or figure.

    Attributes:
        name: of the files in `scripts/results/`.
        title: above the picture.
        unit: of the columns "time" and "delta".
        per_ms: how much of that a millisecond is.
        cases: called with whether they must be tiny; a function of a module.
        published: by name of a variant, or by (model, variant).
        variants: to measure, in order; None means all.
        by_length: draw lines over the length.
        bare: ways whose difference is not to `NO_BIAS`, and to what it is.
    """

    name: str
    title: str
    unit: str
    per_ms: float
    cases: Callable[[bool], Sequence[Case]]
    published: dict[str, Published]
    variants: tuple[str, ...] | None = None
    by_length: bool = False
    bare: dict[str, str] = field(default_factory=dict)

    def main(self, description: str | None) -> None:
        """Measure, write, draw and print."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_options(parser, f"paper/{self.name}.csv")
        parser.add_argument("--rows", nargs="+", type=Path, metavar="FILE.csv",
                            help="measure nothing: take rows of bench_models.py")  # fmt: skip
        options = parser.parse_args()
        options.variants = options.variants or self.variants
        cases = self.cases(options.tiny)
        more = {
            (case.name, variant): self._paper(case, variant)
            for case in cases
            for variant in case.variants()
        }
        columns = (*_OWN, "unit", *_PAPER)
        # first of all: one of these files may be that which is written
        known = [row for path in options.rows or () for row in read_rows(path)]
        known = taken(known, cases, options.variants)
        if options.rows and not known:
            parser.error(f"no row of {cases[0].name!r} in these files")
        if len({(row["device"], row["dtype"]) for row in known}) > 1:
            parser.error("these rows are of more than one card or dtype: compare within one")
        table = Table(options.output, columns, resume=options.resume and not options.rows)
        try:
            if options.rows:
                for row in known:
                    table.add({**row, **more[row["model"], row["variant"]]})
            else:
                run_apart(self.cases, options, table, more=more)
        finally:
            self._finish(table)
        if not table.rows:
            return
        picture = options.output.with_suffix(".png")
        if self.by_length:
            figure.draw_lengths(table.rows, picture, self._with_words(table.rows))
        else:
            figure.draw(table.rows, picture, self.title, self.unit, self.per_ms)
        passage = f"{self._caption(table.rows)}\n\n{beside(table.rows, self.unit)}\n"
        options.output.with_suffix(".md").write_text(passage)
        print(passage)

    def _with_words(self, rows: Sequence[dict[str, str]]) -> str:
        """The title, and what the paper's text says of a figure that has no numbers in print."""
        said = dict.fromkeys(
            f"the paper, A100, {row['model']}: {row['paper_note']}"
            for row in rows
            if row.get("paper_note") and not row.get("paper_time")
        )
        return "; ".join([self.title, *said])

    def _caption(self, rows: Sequence[dict[str, str]]) -> str:
        def every(column: str) -> str:
            return ", ".join(dict.fromkeys(row[column] for row in rows))

        return (
            f"{self.title}: {every('device')}, {every('dtype')}, batch {every('batch')}, torch "
            f"{every('torch')}; beside it the paper's numbers, of an A100."
        )

    def _paper(self, case: Case, variant: str) -> dict[str, str]:
        found = self.published.get(f"{case.name}: {variant}") or self.published.get(variant)
        return {"unit": self.unit, **(found.columns() if found else {})}

    def _finish(self, table: Table) -> None:
        """Fill in what needs more than one row, and write the file once more."""
        times = {(r["model"], r["variant"]): r["median_ms"] for r in table.rows if is_right(r)}
        self._lend(table.rows)
        for row in table.rows:
            way, mode = split_variant(row["variant"])
            bare = self.bare.get(way, NO_BIAS)
            names = [f"{name}{'' if mode == 'eager' else f'-{mode}'}" for name in (bare, *CUDNN)]
            names = names if bare == NO_BIAS else names[:1]
            known = [times[row["model"], name] for name in names if (row["model"], name) in times]
            own, other = row["median_ms"], min(known, key=float, default="")
            if own:
                row["time"] = f"{float(own) * self.per_ms:.4g}"
            if other and is_right(row):
                row["delta"] = f"{(float(own) - float(other)) * self.per_ms:.3g}"
                row["ratio_to_no_bias"] = f"{float(own) / float(other):.4f}"
        with table.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, table.columns)
            writer.writeheader()
            writer.writerows(table.rows)

    def _lend(self, rows: Sequence[dict[str, str]]) -> None:
        """Set the paper's numbers beside a row in eager mode, of cuDNN's, too, or one compiled."""
        known = {(row["model"], row["variant"]) for row in rows}
        for row in rows:
            plain = split_variant(row["variant"])[0].removesuffix("-cudnn")
            modes = ("", "-compiled", "-graphs")
            order = [f"{plain}{cudnn}{mode}" for mode in modes for cudnn in ("", "-cudnn")]
            first = next((name for name in order if (row["model"], name) in known), None)
            found = self.published.get(f"{row['model']}: {plain}") or self.published.get(plain)
            if found is not None and row["variant"] == first:
                row.update(found.columns())


def taken(
    rows: Sequence[dict[str, str]], cases: Sequence[Case], variants: Sequence[str] | None
) -> list[dict[str, str]]:
    """Rows of cases, in the order of a table; of several of one kind the last that has a time.

    Args:
        rows: of any models.
        cases: those of the table.
        variants: patterns, in order; None means all.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        key = row["model"], row["variant"]
        if is_right(row) or key not in found or not is_right(found[key]):
            found[key] = row
    wanted = [(case.name, v) for case in cases for v in chosen(case.variants(), variants)]
    return [found[key] for key in wanted if key in found]


def beside(rows: Sequence[dict[str, str]], unit: str) -> str:
    """Ours and the paper's, as a table in Markdown."""
    titles = ("model", "variant", f"time ({unit})", "to no bias", "MiB", "bias MiB", "error rms",
              "rounding rms", "paper: row", "time", "to no bias", "MB", "its text")  # fmt: skip
    names = ("model", "variant", "time", "delta", "peak_mib", "bias_mib", "error_rms",
             "rounding_rms", "paper_row", "paper_time", "paper_delta", "paper_mb",
             "paper_note")  # fmt: skip
    if not any(row.get("paper_note") for row in rows):
        titles, names = titles[:-1], names[:-1]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [row.get(name, "") for name in names]
        if not is_right(row):
            cells[2] = f"({cells[2]}: {row['reason']})" if cells[2] else row["reason"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
