"""A pytest plugin that writes down how each test went, at once, and leaves out what went well.

`gpu_suite.py` loads it: a run that is ended early has then told what it knows, and the next one
goes on with the others. Does nothing without its environment variables.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

#: environment variables with the files of this run's outcomes, and of tests that are left out
RECORD, KNOWN = "FLASHBIAS_SUITE_RECORD", "FLASHBIAS_SUITE_KNOWN"


def read(path: Path) -> dict[str, str]:
    """Outcomes by test, the latest of each: passed, skipped or failed."""
    if not path.is_file():
        return {}
    lines = [line for line in path.read_text().splitlines() if line.endswith("]")]
    return dict(json.loads(line) for line in lines)


def pytest_configure(config: pytest.Config) -> None:
    if record := os.environ.get(RECORD):
        known = read(Path(os.environ[KNOWN]))
        is_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(_Suite(Path(record), known, is_worker))


class _Suite:
    def __init__(self, record: Path, known: dict[str, str], is_worker: bool) -> None:
        self.record, self.known, self.is_worker = record, known, is_worker

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = [item for item in items if self.known.get(item.nodeid, "failed") != "failed"]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in set(done)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Once a test: its call, or what went before or after it and not well."""
        if self.is_worker or (report.when != "call" and report.outcome == "passed"):
            return
        with self.record.open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")
