"""What else was tried to make the forward kernel faster: edits of its text, beside it as it is.

python scripts/try_edits.py [--edits NAME ...] [--shapes NAME ...] [--output FILE.csv]

Every edit of `kernel_edits.py` is made in a copy of the package, and every shape that it was tried
at is timed with that copy in a process of its own, in bf16, by CUDA graph replays: kernels are
compiled beside each other and timed alone, with the launch settings of today, and windows of SwinV2
with two others as well: the row has the fastest. `difference` is between results of the edited
kernel and of the kernel as it is, the largest of 65,536 numbers; the largest of these is `largest`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_edits import AS_IT_IS, EDITS
from row_file import RowFile
from turns import Wait, in_turns

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flashbias_convert"
OUTPUT = ROOT / "scripts/results/kernel_edits.csv"
COLUMNS = (
    "shape", "edit", "ms", "gain", "difference", "largest", "state", "block_m", "block_n",
    "num_warps", "num_stages", "max_registers", "entries", "card", "torch", "triton",
)  # fmt: skip
#: tokens of a window of SwinV2 at 384 pixels
WINDOW = 576
SAMPLES = 2**16


def copy_package(edit: str, folder: Path) -> Path:
    """A folder to import the edited package from."""
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    if edit != AS_IT_IS:
        EDITS[edit].apply(folder / PACKAGE / "attention")
    return folder


def time_edit(edit: str, shape: str, folder: Path, results: Path, wait: Wait) -> None:
    """One row, in a process that has imported nothing of the package before."""
    sys.path.insert(0, str(folder))
    import torch
    import triton
    from attention_shapes import SHAPES
    from failures import state_of_row
    from tune_attention import make_call, present, time_ms

    import flashbias_convert
    from flashbias_convert.attention import launch
    from flashbias_convert.attention.tuning import LaunchSettings

    assert Path(flashbias_convert.__file__).is_relative_to(folder)
    row = {"shape": shape, "edit": edit, "card": torch.cuda.get_device_name(),
           "torch": str(torch.__version__), "triton": triton.__version__}  # fmt: skip
    sample: Tensor | None = None
    told: dict[str, Any] = {}
    tried = [present(shape)]
    if shape in SHAPES and SHAPES[shape].d == 32 and SHAPES[shape].n == WINDOW:
        tried += [LaunchSettings(64, 64, 4, 3, 128), LaunchSettings(128, 64, 4, 3, 168)]
    try:
        call = make_call(shape)
        for settings in tried:
            with launch.forced(settings):
                out = call().flatten()
        sample = out[:: math.ceil(out.numel() / SAMPLES)].float().cpu()
        wait()
        times = {}
        for settings in dict.fromkeys(tried):
            with launch.forced(settings):
                times[settings] = time_ms(call)
        best = min(times, key=lambda settings: times[settings])
        told = {"ms": f"{times[best]:.4f}", "state": "ok", **dataclasses.asdict(best)}
    except Exception as problem:
        told = {"state": state_of_row(f"{edit}, {shape}", problem)}
        wait()
    torch.save((row | told, sample), results / f"{shape} {edit}".replace("/", " "))


def compared(found: dict[tuple[str, str], Any], shape: str, edit: str) -> dict[str, Any]:
    """A row with what it is worth beside the kernel as it is."""
    row, sample = found[shape, edit]
    base, right = found.get((shape, AS_IT_IS), ({}, None))
    if row.get("ms") and base.get("ms"):
        row["gain"] = f"{float(base['ms']) / float(row['ms']):.3f}"
    if sample is not None and right is not None:
        row["difference"] = f"{float((sample - right).abs().max()):.2e}"
        row["largest"] = f"{float(right.abs().max()):.2e}"
    return dict(row)


def wanted(edits: list[str], shapes: list[str] | None) -> list[tuple[str, str]]:
    """Pairs of edit and shape; the kernel as it is first, at all shapes of the edits."""
    pairs = [
        (edit, shape)
        for edit in edits
        for shape in EDITS[edit].shapes
        if shapes is None or shape in shapes
    ]
    return [(AS_IT_IS, shape) for shape in dict.fromkeys(s for _, s in pairs)] + pairs


def main() -> None:
    """Copy, edit, compile, time, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--edits", nargs="*", choices=list(EDITS), default=list(EDITS))
    parser.add_argument("--shapes", nargs="*")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--together", type=int, default=16, help="processes that compile")
    parser.add_argument("--stop-s", type=float, help="begin to time nothing after")
    options = parser.parse_args()
    table = RowFile(options.output, COLUMNS, key=("shape", "edit"))
    pairs = wanted(options.edits, options.shapes)
    with tempfile.TemporaryDirectory() as name:
        results = Path(name) / "results"
        results.mkdir()
        copies = {
            edit: copy_package(edit, Path(name) / str(number))
            for number, edit in enumerate(dict.fromkeys(edit for edit, _ in pairs))
        }
        calls = [(edit, shape, copies[edit], results) for edit, shape in pairs]
        in_turns(time_edit, calls, together=options.together, seconds=options.stop_s)
        write(table, results)


def write(table: RowFile, results: Path) -> None:
    """Rows of what was timed, the kernel as it is first."""
    import torch

    loaded = [torch.load(path) for path in sorted(results.iterdir())]
    found = {(row["shape"], row["edit"]): (row, sample) for row, sample in loaded}
    for shape, edit in sorted(found, key=lambda key: (key[0], key[1] != AS_IT_IS, key[1])):
        row = table.add(compared(found, shape, edit))
        print(*(f"{row[name]:32s}" for name in ("shape", "edit")), row["ms"], row["gain"],
              row["difference"], row["state"], flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
