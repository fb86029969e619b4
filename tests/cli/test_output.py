"""The bar that shows progress."""

from __future__ import annotations

from rich.progress import Progress

from flashbias_convert.cli.output import Bar


def test_a_bar_counts_sites_and_then_megabytes() -> None:
    progress = Progress(disable=True)
    bar = Bar(progress, progress.add_task("reading", total=None), "decomposing")
    (task,) = progress.tasks
    bar(1, 3, "blocks.0")
    assert (task.completed, task.total, task.description) == (1, 3, "decomposing blocks.0")
    bar.copying(5_900_000, 20_000_000, "model-00001")
    assert (task.completed, task.total) == (5, 20)
    assert task.description == "copying model-00001 (MB)"
