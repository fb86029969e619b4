"""The sink of all output: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

#: columns where stdout is no terminal and COLUMNS says nothing: a file is not narrow
_FILE_WIDTH = 160
#: called with (steps done, steps in all as far as is known, name of the present one)
Step = Callable[[int, int, str], None]


class Output:
    """Prints for people, as one JSON object, or not at all.

    Args:
        as_json: one JSON object on stdout, and nothing else there.
        quiet: nothing but errors.
        verbose: 1 shows what the library logs, 2 its details.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False, verbose: int = 0) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._stdout = _console(sys.stdout)
        self._stderr = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
        _set_up_logging(self, verbose)

    @property
    def width(self) -> int:
        """Columns of stdout."""
        return self._stdout.width

    def result(self, data: Callable[[], Mapping[str, Any]], *lines: RenderableType) -> None:
        """The result of a command: `data()` with ``--json``, else `lines`."""
        if self.as_json:
            print_json(data())
        elif not self.quiet:
            for line in lines:
                self._stdout.print(line, soft_wrap=isinstance(line, str))

    def note(self, text: str) -> None:
        """Something worth knowing that is not a result."""
        if not self.quiet:
            self._stderr.print(text)

    @contextmanager
    def progress(self, before: str, what: str) -> Iterator[Bar | None]:
        """A bar that a callback (done, total, name) moves; None where nobody would see it.

        Args:
            before: what happens until the first call.
            what: what happens from then on.
        """
        if self.quiet or not self._stderr.is_terminal:
            yield None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=self._stderr, transient=True) as bar:
            yield Bar(bar, bar.add_task(before, total=None), what)

    @contextmanager
    def steps(self, before: str) -> Iterator[Step | None]:
        """The same for steps that may take minutes each; off a terminal, a line for each.

        None with ``--quiet``, and off a terminal with ``--json``.
        """
        if self.quiet or self.as_json or self._stderr.is_terminal:
            with self.progress(before, "") as bar:
                yield bar
            return
        yield lambda done, total, name: self.note(f"{name} ({done + 1} of {total})")


class Bar:
    """Moves a bar: called with (done, total, name).

    Args:
        bar: what is shown.
        task: its only task.
        what: what happens, in front of the names.
    """

    def __init__(self, bar: Progress, task: TaskID, what: str) -> None:
        self._bar, self._task, self._what = bar, task, what

    def __call__(self, done: int, total: int, name: str) -> None:
        self._bar.update(
            self._task, completed=done, total=total, description=f"{self._what} {name}".strip()
        )

    def copying(self, done: int, total: int, name: str) -> None:
        """The same for bytes that are copied; the bar counts megabytes."""
        self._bar.update(
            self._task,
            completed=done // 10**6,
            total=total // 10**6,
            description=f"copying {name} (MB)",
        )


def print_json(data: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(data, indent=2))


def print_error(message: str, hint: str = "") -> None:
    """One line, and a hint, on stderr."""
    console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
    console.print("error:", style="bold red", end=" ")
    console.print(" ".join(message.split()))
    if hint:
        console.print("hint:", style="bold", end=" ")
        console.print(" ".join(hint.split()))


def _console(file: Any) -> Console:
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(file=file, highlight=False, markup=False, emoji=False, width=_FILE_WIDTH)
    return console


class _NoteHandler(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        self._output.note(f"{record.levelname.lower()}: {text}")


def _set_up_logging(output: Output, verbose: int) -> None:
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logger = logging.getLogger("flashbias_convert")
    logger.handlers = [_NoteHandler(output)]
    logger.setLevel(level)
    logger.propagate = False
    # Python's warnings are for programmers: shown only on request
    logging.captureWarnings(True)
    warnings = logging.getLogger("py.warnings")
    warnings.handlers = [_NoteHandler(output)] if verbose else [logging.NullHandler()]
    warnings.propagate = False
