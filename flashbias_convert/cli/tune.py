"""``flashbias-convert tune``: measure how the kernel is best launched on this card."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from .groups import Building, Speaking, grouped
from .output import Output
from .parameters import CheckpointArg
from .values import json_object, load_recipes, torch_device
from .verification import BatchOpt, SeedOpt, quiet_libraries
from .verify import InputsOpt, TokensOpt

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from torch import nn

    from ..launch_tuning import Launch, Tuned

_DeviceOpt = Annotated[str, typer.Option(help="The card: cuda, cuda:1 ...")]
_DryRunOpt = Annotated[
    bool, typer.Option("--dry-run", metavar="", help="Measure, and write nothing.")
]


@grouped
def tune(
    checkpoint: CheckpointArg,
    building: Building,
    speaking: Speaking,
    inputs: InputsOpt = "random",
    batch: BatchOpt = 8,
    tokens: TokensOpt = None,
    seed: SeedOpt = 0,
    device: _DeviceOpt = "cuda",
    dry_run: _DryRunOpt = False,
) -> int:
    """Measure launch settings for the attention of a converted model, on this machine's card.

    The model runs once in half precision; for every shape of its attention calls the kernel is
    timed with other tiles, warps and stages. What is clearly faster than the built-in rule is
    written to a file of this machine (FLASHBIAS_TUNING names its folder), and used from the next
    process on: results may differ from those of before in their last bits.
    """
    if not device.startswith("cuda"):
        raise UsageError(f"there is nothing to tune on {device}", "name a card: --device cuda")
    built_with = json_object(building.arch_args)
    output = Output(speaking.json, speaking.quiet, speaking.verbose)
    place = torch_device(device)
    quiet_libraries(building.arch, inputs)
    import torch

    from ..attention.local_settings import settings_file, write_settings
    from ..launch_tuning import tune_launches

    with output.progress("reading and running", "timing") as bar:
        model = _model(checkpoint, building, built_with, device)
        launches = _launches(model, checkpoint, inputs, batch, tokens, seed)
        results = tune_launches(launches, progress=bar)
    card = torch.cuda.get_device_name(place)
    file = settings_file(card)
    changed = {r.shape: r.settings for r in results if r.best_ms < r.rule_ms}
    if changed and not dry_run:
        import triton

        about = {"card": card, "torch": torch.__version__, "triton": triton.__version__}
        write_settings(file, changed, about)
    _say(output, results, None if dry_run or not changed else str(file))
    return 0


def _model(checkpoint: Path, building: Building, built_with: Any, device: str) -> nn.Module:
    import torch

    from ..checkpoint import load_model
    from ..checkpoint.architecture import as_architecture

    arch = None if building.arch is None else as_architecture(building.arch, built_with)
    recipes = load_recipes(tuple(building.recipe or ()))
    return load_model(
        checkpoint,
        arch=arch,
        recipes=recipes,
        device=device,
        dtype=torch.bfloat16,
        backend="triton",
    )


def _launches(
    model: nn.Module, checkpoint: Path, inputs: str, batch: int, tokens: int | None, seed: int
) -> list[Launch]:
    """The launches of one forward pass."""
    import torch

    from ..inputs import read_inputs
    from ..launch_tuning import recorded_launches

    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    found = read_inputs(
        model, inputs, samples=batch, batch=batch, seed=seed, tokens=tokens, assets=folder
    )
    parameter = next(model.parameters())
    with torch.inference_mode(), recorded_launches() as launches:
        for each in islice(found.batches, 1):
            own = each.to(parameter.device, parameter.dtype)
            model(*own.args, **own.kwargs)
    if not launches:
        raise UsageError(
            "the kernel was not launched: no site of this file is converted",
            "`flashbias-convert show` lists them",
        )
    return launches


def _say(output: Output, results: list[Tuned], file: str | None) -> None:
    lines = []
    for r in results:
        shape = f"N {r.shape.n}, head size {r.shape.d}, {r.shape.columns} columns"
        terms = f", {', '.join(r.shape.terms)}" if r.shape.terms else ""
        gain = "the rule stays" if r.best_ms == r.rule_ms else f"{r.rule_ms / r.best_ms:.2f}x"
        lines.append(f"{shape}{terms}: {r.rule_ms:.4f} ms -> {r.best_ms:.4f} ms, {gain}")
    lines.append(f"written to {file}" if file else "nothing was written")

    def as_dict() -> dict[str, Any]:
        return {
            "file": file,
            "shapes": [
                {
                    "shape": asdict(r.shape),
                    "rule_ms": r.rule_ms,
                    "best_ms": r.best_ms,
                    "settings": asdict(r.settings),
                    "tried": r.tried,
                    "failed": list(r.failed.values()),
                }
                for r in results
            ],
        }

    output.result(as_dict, *lines)
