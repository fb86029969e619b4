"""Notebooks run from the first cell to the last, with and without widgets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
exceptions = pytest.importorskip("nbclient.exceptions")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "rank_inspection.ipynb"
EXAMPLE = "examples/swinv2_cifar10"
#: of a cell; the slowest takes a few
LIMIT_S = 110
SETUP = f"""import faulthandler, os, torch
faulthandler.dump_traceback_later({LIMIT_S - 10}, repeat=True, file=open("stacks.txt", "w"))
os.environ["FLASHBIAS_CROPS"] = "4"
torch.set_num_threads(1)
"""


def run(folder: Path, until: str | None = None, before: str = "") -> Any:
    """Execute a copy in `folder`.

    Args:
        folder: the working directory; the example is copied into it.
        until: text of the last cell to run; None runs all.
        before: code that runs first.
    """
    shutil.copytree(ROOT / EXAMPLE, folder / EXAMPLE, dirs_exist_ok=True)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if until is not None:
        last = next(i for i, cell in enumerate(notebook.cells) if until in cell.source)
        notebook.cells = notebook.cells[: last + 1]
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP + before))
    where = {"metadata": {"path": str(folder)}}
    for attempt in (1, 2):  # now and then a kernel never answers
        try:
            nbclient.NotebookClient(notebook, timeout=LIMIT_S, resources=where).execute()
            break
        except exceptions.CellTimeoutError:
            for stacks in folder.glob("stacks.txt"):
                print(f"where the kernel was:\n{stacks.read_text()}")
            if attempt == 2:
                raise
    return notebook


def text_of(cell: Any) -> str:
    parts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "".join(parts)


def cell_with(notebook: Any, text: str) -> Any:
    (found,) = [c for c in notebook.cells if c.cell_type == "code" and text in c.source]
    return found


def pictures(notebook: Any) -> int:
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    return sum("image/png" in o.get("data", {}) for o in outputs)


def test_the_notebook_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not c.outputs for c in notebook.cells if c.cell_type == "code")


def test_the_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("ipywidgets")
    notebook = run(tmp_path)
    assert pictures(notebook) == 4
    choice = cell_with(notebook, "FloatSlider").outputs
    assert any("application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in choice)
    compared = text_of(cell_with(notebook, "results[label] = verify_model"))
    lines = {line.split()[0]: line for line in compared.splitlines()}
    assert "exact        passed True  same class 100.0%" in lines["exact"]
    assert "approximate  passed True" in lines["chosen"]
    sites = text_of(cell_with(notebook, 'results["chosen"].sites'))
    assert sites.count("layers.") == 10


def test_without_widgets_a_list_stands_in(tmp_path: Path) -> None:
    blocked = "import sys\nsys.modules['ipywidgets'] = None\n"
    notebook = run(tmp_path, until="FloatSlider", before=blocked)
    shown = text_of(cell_with(notebook, "FloatSlider"))
    ranks = [
        int(line.split("rank ")[1].split(",")[0]) for line in shown.splitlines() if "rank" in line
    ]
    assert len(ranks) == 6 and ranks[0] < ranks[2] < ranks[4]
    assert pictures(notebook) == 4 + 3
