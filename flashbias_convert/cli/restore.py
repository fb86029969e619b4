"""``flashbias-convert restore``: the original tensors back out of a converted file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import Output
from .parameters import DebugOpt, ForceOpt, JsonOpt, QuietOpt
from .show import ConvertedArg

RestoredOpt = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="Default: NAME.restored.safetensors beside a file, a folder NAME.restored beside a "
        "folder.",
        show_default=False,
    ),
]


def restore(
    converted: ConvertedArg,
    output: RestoredOpt = None,
    force: ForceOpt = False,
    json: JsonOpt = False,
    debug: DebugOpt = False,
    quiet: QuietOpt = False,
) -> int:
    """Write the original checkpoint back: its tensors bit for bit, under its names.

    The header's metadata comes back, too, and the config files of a folder. The converted
    checkpoint stays.
    """
    out = Output(as_json=json, quiet=quiet)
    from ..checkpoint import restore_checkpoint

    done = restore_checkpoint(converted, output, force=force)

    def data() -> dict[str, Any]:
        return {
            "command": "restore",
            "input": str(converted),
            "output": str(done.output),
            "tensors": done.tensors,
            "notes": list(done.notes),
            "exit_code": 0,
        }

    for note in done.notes:
        out.note(f"note: {note}")
    out.result(data, f"wrote {done.output}: {done.tensors} tensors of the original, bit for bit")
    return 0
