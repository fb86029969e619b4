"""Counts what the tests of this folder tried, and prints the sums at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.attention.conftest import kernel

__all__ = ["kernel"]

Count = Callable[..., None]

_PREFIX = "abuse:"


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Count an outcome: ``count("files", "refused: CheckpointError")``, or several at once."""

    def add(what: str, outcome: str, times: int = 1) -> None:
        record_property(f"{_PREFIX}{what}:{outcome}", times)

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The sums over all tests, of all workers."""
    sums: dict[str, Counter[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            # a report comes once for each phase, with the same properties
            if getattr(report, "when", None) != "call":
                continue
            for name, times in report.user_properties:
                if name.startswith(_PREFIX):
                    what, outcome = name.removeprefix(_PREFIX).split(":", 1)
                    sums.setdefault(what, Counter())[outcome] += times
    if not sums:
        return
    terminalreporter.section("abuse")
    for what, outcomes in sorted(sums.items()):
        terminalreporter.write_line(f"{what}: {sum(outcomes.values())}")
        for outcome, times in sorted(outcomes.items(), key=lambda item: (-item[1], item[0])):
            terminalreporter.write_line(f"  {times:6d} {outcome}")
