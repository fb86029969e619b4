"""The table of contents in the README has every heading, and its links lead to them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def without_code(text: str) -> str:
    """Lines that begin with # in code are comments."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_contents() -> None:
    text = without_code(README.read_text())
    headings = re.findall(r"^(##|###) (.+)$", text, flags=re.MULTILINE)
    expected = [
        f"{'  ' if level == '###' else ''}- [{heading}](#{anchor(heading)})"
        for level, heading in headings
        if heading != "Contents"
    ]
    assert len(expected) == len(set(expected)) > 10
    listed = re.search(r"^## Contents\n\n(.+?)\n\n", text, flags=re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert listed[1].splitlines() == expected


def test_files_that_are_linked_to_are_there() -> None:
    found = re.findall(r"\]\(\s*([^)#\s]+)\s*\)", without_code(README.read_text()))
    paths = [path for path in found if "://" not in path]
    assert len(paths) > 10
    assert [path for path in paths if not (README.parent / path).exists()] == []
