"""Write the tables of supported architectures in the README, from the recipes themselves.

python scripts/supported_table.py            # writes README.md
python scripts/supported_table.py --check    # says whether it would change anything

What a recipe gains is what was measured by

python scripts/bench_models.py --models families --output scripts/results/bench_families.csv
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from packaging.specifiers import SpecifierSet

from flashbias_convert.about import About
from flashbias_convert.recipe import GROUP, Recipe, class_of

README = Path(__file__).parent.parent / "README.md"
#: rows of `scripts/bench_models.py`; their models are called by the name of a recipe and a comma
MEASURED = Path(__file__).parent / "results" / "bench_families.csv"
NOT_MEASURED = "not measured"
#: variants that are compared
ORIGINAL, OURS = "original-compiled", "ours-compiled"
#: beside the original: what its library computes with a switch that is off by default
FUSED = "original-fused-compiled"
#: beside this one where torch fails to compile the original
EAGER = "original"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
#: the lines between which a table stands
MARKS = "<!-- {}: written by scripts/supported_table.py -->", "<!-- end of {} -->"


def installed() -> list[Recipe]:
    """The recipes of this package, in the order of their names."""
    package = "flashbias_convert.recipes."
    points = [p for p in entry_points(group=GROUP) if p.value.startswith(package)]
    own = {point.value: point for point in points}
    found = [point.load() for point in own.values()]
    return sorted(found, key=lambda r: (r.library not in ("timm", "transformers"), r.name))


def converted_table(recipes: list[Recipe], gains: Mapping[str, str]) -> str:
    """One row for every recipe that converts something.

    Args:
        recipes: of both kinds.
        gains: see `measured_gains`.
    """
    rows = []
    for recipe, about in _described(recipes):
        if not about.refused:
            what = (_classes(recipe), about.n, about.exact, about.truncated)
            gain = gains.get(recipe.name, NOT_MEASURED)
            last = (gain, about.tested or tested(recipe))
            rows.append((f"`{recipe.name}`", about.models, *what, *last))
    titles = ("recipe", "models", "classes", "tokens a call", "what is exact")
    return _table((*titles, "what is truncated", "what it gains", "tested with"), rows)


def measured_gains(path: Path) -> dict[str, str]:
    """What recipes gain, such as "2.1x / 1.8x, H200, bf16": the original's time over ours.

    Both compiled, but for originals that torch fails to compile: first recorded as a CUDA graph,
    what the card takes, then in calls, in which a card may wait for its host. Of originals with and
    without a switch for fused attention the faster one counts, for each of the two. Rows that are
    wrong count for nothing.

    Args:
        path: a file of `scripts/bench_models.py`; if there is none, nothing was measured.

    Returns:
        By the name of a recipe, one entry for each kind of card and dtype; of several models of one
        recipe the smallest gains.
    """
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if _counts(row)]
    variants: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        where = f"{_card(row['device'])}, {_SHORT.get(row['dtype'], row['dtype'])}"
        name = row["model"].partition(",")[0]
        variants.setdefault((name, where, row["model"]), {})[row["variant"]] = row
    found: dict[str, dict[str, list[float]]] = {}
    for (name, where, _), by_variant in variants.items():
        compiled = [by_variant[name] for name in (ORIGINAL, FUSED) if name in by_variant]
        originals = compiled or [by_variant[name] for name in (EAGER,) if name in by_variant]
        if originals and OURS in by_variant:
            where += "" if compiled else ", the original in eager mode"
            each = [_ratios(original, by_variant[OURS]) for original in originals]
            ratios = [min(pair) for pair in zip(*each, strict=True)]
            own = found.setdefault(name, {})
            known = own.get(where, ratios)
            own[where] = [min(pair) for pair in zip(known, ratios, strict=True)]
    return {name: "; ".join(_gain(*one) for one in own.items()) for name, own in found.items()}


def _counts(row: dict[str, str]) -> bool:
    return bool(row["median_ms"]) and row["device"] != "cpu" and row["status"] != "wrong"


def _ratios(original: dict[str, str], ours: dict[str, str]) -> list[float]:
    """Of CUDA graphs and of calls; infinite where there is no graph."""
    graphs = [row.get("replay_ms") or "" for row in (original, ours)]
    replay = float(graphs[0]) / float(graphs[1]) if all(graphs) else float("inf")
    return [replay, float(original["median_ms"]) / float(ours["median_ms"])]


def _gain(where: str, ratios: list[float]) -> str:
    replay, call = (f"{ratio:.2f}x" if ratio < 1 else f"{ratio:.1f}x" for ratio in ratios)
    return f"{call}, {where}" if ratios[0] == float("inf") else f"{replay} / {call}, {where}"


def _card(name: str) -> str:
    """ "NVIDIA H100 80GB HBM3" is an H100."""
    return name.removeprefix("NVIDIA ").partition(" ")[0]


def refused_table(recipes: list[Recipe]) -> str:
    """One row for every recipe that says why its classes are not converted."""
    rows = [
        (about.models, _classes(recipe), about.refused, about.tested or tested(recipe))
        for recipe, about in _described(recipes)
        if about.refused
    ]
    return _table(("models", "classes", "what a plan says of them", "tested with"), rows)


def tested(recipe: Recipe) -> str:
    """ "timm 1.0.23 to 1.0.x": the library and its range of releases, the last one included."""
    ends = {s.operator: s.version for s in SpecifierSet(recipe.tested)}
    first, after = ends[">="], [int(part) for part in ends["<"].split(".")]
    after[-1] -= 1
    last = ".".join(map(str, after))
    if first == last:
        return f"{recipe.library} {first}"
    return f"{recipe.library} {first} to {last}" + (".x" if first.startswith(f"{last}.") else "")


def with_tables(text: str, recipes: list[Recipe]) -> str:
    """A README with its tables as the recipes have them."""
    supported = converted_table(recipes, measured_gains(MEASURED))
    tables = {"supported": supported, "refused": refused_table(recipes)}
    for name, table in tables.items():
        start, end = (mark.format(name) for mark in MARKS)
        between = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        if len(between.findall(text)) != 1:
            raise ValueError(f"README.md needs one line {start!r} and after it one {end!r}")
        text = between.sub(lambda _, t=table, s=start, e=end: f"{s}\n{t}\n{e}", text)
    return text


def _described(recipes: list[Recipe]) -> list[tuple[Recipe, About]]:
    lacking = [recipe.name for recipe in recipes if recipe.about is None]
    if lacking:
        raise ValueError(f"recipes without `about`: {', '.join(lacking)}")
    return [(recipe, recipe.about) for recipe in recipes if recipe.about is not None]


def _classes(recipe: Recipe) -> str:
    """Short names, each once."""
    names = dict.fromkeys(class_of(name).rpartition(".")[2] for name in recipe.classes)
    return ", ".join(f"`{name}`" for name in names)


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    first, *others = (f"| {' | '.join(line)} |" for line in (titles, *rows))
    return "\n".join((first, "|---" * len(titles) + "|", *others))


def main() -> int:
    """Returns 1 if `--check` finds a README that is stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    before = README.read_text()
    after = with_tables(before, installed())
    if before == after:
        return 0
    if check:
        print("README.md is stale: run python scripts/supported_table.py", file=sys.stderr)
        return 1
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
