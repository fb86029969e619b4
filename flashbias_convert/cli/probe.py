"""``flashbias-convert probe``: what does a model add to its attention scores?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from .exit_codes import ExitCode
from .groups import Building, Speaking, grouped
from .output import Output
from .parameters import (
    CheckpointArg,
    ReportOpt,
)
from .reports import check_report, write_report
from .values import json_object, load_recipes, torch_device
from .verification import Comparing, SeedOpt, TokenizerOpt, quiet_libraries
from .verify import InputsOpt, TokensOpt

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from torch import nn

    from ..inputs import Inputs
    from ..probing import Probe

_BatchOpt = Annotated[
    int,
    typer.Option(
        help="Samples in each of the two passes; more of them tell more surely what depends on "
        "the query."
    ),
]
_EnergyOpt = Annotated[float, typer.Option(help="Ranks are given for this share, in (0, 1].")]
_DeviceOpt = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1 ...")]
_WriteRecipeOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a starting recipe for the class with most biased sites without one.",
        show_default=False,
    ),
]
_ForceOpt = Annotated[bool, typer.Option("--force", metavar="", help="Replace existing files.")]


@grouped
def probe(
    checkpoint: CheckpointArg,
    building: Building,
    speaking: Speaking,
    inputs: InputsOpt = "random",
    batch: _BatchOpt = 4,
    seed: SeedOpt = 0,
    tokens: TokensOpt = None,
    tokenizer: TokenizerOpt = None,
    energy: _EnergyOpt = 0.99,
    device: _DeviceOpt = "cpu",
    write_recipe: _WriteRecipeOpt = None,
    report: ReportOpt = None,
    force: _ForceOpt = False,
) -> int:
    """Run a model twice and say what it adds to its attention scores, with or without a recipe.

    For every attention: what kind of bias it is, which term would serve, and what that would save.
    The exit code is 3 where no bias was found.
    """
    options = Comparing(
        inputs=inputs, batch=batch, seed=seed, tokens=tokens, tokenizer=tokenizer, device=device
    )
    options.check()
    if not 0.0 < energy <= 1.0:
        raise UsageError(f"energy must be in (0, 1], got {energy}")
    built_with = json_object(building.arch_args)
    check_report(report, sources=(checkpoint,), force=force)
    _check_recipe_file(write_recipe, checkpoint, force)
    output = Output(speaking.json, speaking.quiet, speaking.verbose)
    quiet_libraries(building.arch, inputs)
    from ..checkpoint import open_model
    from ..probing import probe_model
    from .probe_table import probe_lines

    extra = load_recipes(tuple(building.recipe or ()))
    with output.progress("reading and running", ""):
        opened = open_model(
            checkpoint, arch=building.arch, arch_args=built_with, device=torch_device(device)
        )
        folder = tokenizer or opened.checkpoint.folder
        given = _inputs(opened.model, options, folder)
        found = probe_model(opened.model, given, energy=energy, recipes=extra)
    code = ExitCode.DONE if found.biased else ExitCode.NOTHING
    written = _write_recipe(write_recipe, found, opened.model, force)

    def data() -> dict[str, Any]:
        names = {"command": "probe", "input": str(checkpoint)}
        recipe_file = None if write_recipe is None else str(write_recipe)
        told = {"recipe_file": recipe_file, "exit_code": int(code)}
        return {**names, **told, "probe": found.to_dict()}

    header = f"{checkpoint}: {opened.architecture}; {found.inputs}"
    output.result(data, header, *probe_lines(found, output.width, speaking.verbose > 0), *written)
    write_report(report, data, force)
    return code


def _inputs(model: nn.Module, options: Comparing, folder: Path | None) -> Inputs:
    """Two batches, if there is enough for two."""
    from ..inputs import read_inputs

    return read_inputs(
        model,
        options.inputs,
        samples=2 * options.batch,
        batch=options.batch,
        seed=options.seed,
        tokens=options.tokens,
        assets=folder,
    )


def _check_recipe_file(path: Path | None, checkpoint: Path, force: bool) -> None:
    if path is None:
        return
    if path.suffix != ".py":
        raise UsageError(f"a recipe is a Python file, got {path}", "choose a name that ends in .py")
    check_report(path, sources=(checkpoint,), force=force, option="--write-recipe")


def _write_recipe(path: Path | None, found: Probe, model: nn.Module, force: bool) -> list[str]:
    """Write the file; returns what to say about it."""
    if path is None:
        return []
    from ..checkpoint.staging import Staging
    from ..probing import recipe_text

    text, about = recipe_text(found, model)
    try:
        with Staging(force) as staging:
            staging.add(path.resolve()).write_text(text, encoding="utf-8")
            staging.commit()
    except OSError as error:
        raise UsageError(f"the recipe {path} cannot be written: {error.strerror}") from error
    return [f"wrote {path}, a starting recipe for {about}: complete it, then --recipe {path}"]
