"""The table of public bug reports: every report is held by tests that exist, or says why not."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("pitfalls.md")
TEST = re.compile(r"`([^`\s]+\.py)::(\w+)`")
LINK = re.compile(r"\[([^\]]+)\]\(https://github\.com/([^)]+)\)")


def rows() -> list[list[str]]:
    """The cells of every row: report, pitfall, what holds it."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells for cells in found if cells[0] != "report"]


ROWS = rows()


@cache
def functions(path: str) -> frozenset[str]:
    """Names of the functions at the top of a file, which is parsed and not imported."""
    nodes = ast.parse((ROOT / path).read_text()).body
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[1][:50])
def test_a_report_is_held_by_tests_that_exist(cells: list[str]) -> None:
    report, pitfall, held = cells
    assert report and pitfall
    tests = TEST.findall(held)
    assert held.count("`") == 2 * len(tests), "a test is written as `path::function`"
    for path, name in tests:
        assert name.startswith("test_") and (ROOT / path).is_file(), path
        assert name in functions(path), f"{path} has no function {name}"
    # a reason is a sentence
    assert tests or (held.endswith(".") and len(held.split()) > 4), "neither a test nor a reason"


def test_no_report_is_told_twice() -> None:
    """A thread may be about two pitfalls; the same threads in two rows are one pitfall."""
    reports = [cells[0] for cells in ROWS]
    assert len(reports) > 40 and len(set(reports)) == len(reports)
    pitfalls = [cells[1] for cells in ROWS]
    assert len(set(pitfalls)) == len(pitfalls)


def test_links_lead_to_the_threads_that_they_name() -> None:
    repository = ""
    for name, address in [link for cells in ROWS for link in LINK.findall(cells[0])]:
        own, _, number = name.partition("#")
        repository = own or repository  # a second thread of one repository is a number
        assert re.fullmatch(re.escape(repository) + (rf"/(issues|pull)/{number}" if number else ""),
                            address), name  # fmt: skip
