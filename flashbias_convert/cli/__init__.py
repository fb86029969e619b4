"""The command line. Only here are typer and rich imported, is anything printed, or exited."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``flashbias-convert`` and exit with its code, see `ExitCode`."""
    try:
        from .app import run

        code = run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # during the imports, or while an error was told
        print("error: interrupted, no output was written", file=sys.stderr)
        code = 130
    sys.exit(code)
