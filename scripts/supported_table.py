"""Write the tables of supported architectures in the README, from the recipes themselves.

python scripts/supported_table.py            # writes README.md
python scripts/supported_table.py --check    # says whether it would change anything
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

from packaging.specifiers import SpecifierSet

from flashbias_convert.about import About
from flashbias_convert.recipe import GROUP, Recipe

README = Path(__file__).parent.parent / "README.md"
#: the lines between which a table stands
MARKS = "<!-- {}: written by scripts/supported_table.py -->", "<!-- end of {} -->"


def installed() -> list[Recipe]:
    """The recipes of this package, in the order of their names."""
    package = "flashbias_convert.recipes."
    points = [p for p in entry_points(group=GROUP) if p.value.startswith(package)]
    own = {point.value: point for point in points}
    found = [point.load() for point in own.values()]
    return sorted(found, key=lambda r: (r.library not in ("timm", "transformers"), r.name))


def converted_table(recipes: list[Recipe]) -> str:
    """One row for every recipe that converts something."""
    rows = []
    for recipe, about in _described(recipes):
        if not about.refused:
            what = (_classes(recipe), about.n, about.exact, about.truncated)
            rows.append((f"`{recipe.name}`", about.models, *what, about.tested or tested(recipe)))
    titles = ("recipe", "models", "classes", "tokens a call", "what is exact")
    return _table((*titles, "what is truncated", "tested with"), rows)


def refused_table(recipes: list[Recipe]) -> str:
    """One row for every recipe that says why its classes are not converted."""
    rows = [
        (about.models, _classes(recipe), about.refused, about.tested or tested(recipe))
        for recipe, about in _described(recipes)
        if about.refused
    ]
    return _table(("models", "classes", "what a plan says of them", "tested with"), rows)


def tested(recipe: Recipe) -> str:
    """ "timm 1.0.23 to 1.0": the library and the range of its specifier, the last one included."""
    ends = {s.operator: s.version for s in SpecifierSet(recipe.tested)}
    first, after = ends[">="], [int(part) for part in ends["<"].split(".")]
    after[-1] -= 1
    last = ".".join(map(str, after))
    return f"{recipe.library} {first}" + ("" if first.startswith(last) else f" to {last}")


def with_tables(text: str, recipes: list[Recipe]) -> str:
    """A README with its tables as the recipes have them."""
    tables = {"supported": converted_table(recipes), "refused": refused_table(recipes)}
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
    names = dict.fromkeys(name.rpartition(".")[2] for name in recipe.classes)
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
