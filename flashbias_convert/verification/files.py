"""Compare a converted file with the checkpoint that it was made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Architecture, load_model, open_model, read_plan
from ..checkpoint.architecture import ArchLike, as_architecture
from ..checkpoint.weights import differing_weights
from ..inputs import read_inputs
from ..plan import Plan
from ..recipe import Recipe
from .models import Progress, verify_model
from .result import Verification


def verify_files(
    original: str | Path,
    converted: str | Path,
    *,
    inputs: str | Path | Callable[..., Any] = "random",
    samples: int = 32,
    batch: int = 8,
    seed: int = 0,
    tokens: int | None = None,
    assets: Path | None = None,
    arch: ArchLike | None = None,
    arch_args: Mapping[str, Any] | None = None,
    recipes: Iterable[Recipe] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    max_difference: float | None = None,
    min_agreement: float | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Load both, make inputs, and compare; see `verify_model`.

    Beyond the outputs, the weights are compared: the converted file must hold those of the
    original, bit for bit.

    Args:
        original: the checkpoint before conversion: a file, an index of shards, or a folder.
        converted: what became of it: a file or a folder.
        inputs, samples, batch, seed, tokens, assets: see `read_inputs`; `assets` is the folder of
            the original where none is given.
        arch, arch_args: the architecture; default what the plan in the converted file says, else
            what the original tells.
        recipes: recipes beside the installed ones.
        dtype: float32, float16 or bfloat16.
        device: where to compare; default the CPU.
        max_difference, min_agreement: limits, see `verify_model`.
        progress: called with the number of samples after each batch.

    Raises:
        CheckpointError, UnknownArchitectureError: see `open_model` and `load_model`.
        UsageError: see `read_inputs` and `verify_model`.
    """
    plan = read_plan(converted)
    opened = open_model(original, arch=planned_architecture(plan, arch, arch_args, converted))
    # the maker's function must be passed again, everything else is in the plan
    again = opened.architecture if opened.architecture.factory is not None else None
    model = load_model(converted, arch=again, recipes=tuple(recipes))
    folder = assets or opened.checkpoint.folder
    read = read_inputs(
        opened.model, inputs, samples=samples, batch=batch, seed=seed, tokens=tokens, assets=folder
    )
    result = verify_model(
        opened.model,
        model,
        read,
        plan=plan,
        dtype=dtype,
        device=device or torch.device("cpu"),
        max_difference=max_difference,
        min_agreement=min_agreement,
        progress=progress,
    )
    wrong = _wrong_weights(opened.stored, Path(converted))
    return dataclasses.replace(result, reasons=(*wrong, *result.reasons))


def planned_architecture(
    plan: Plan, arch: ArchLike | None, args: Mapping[str, Any] | None, path: str | Path
) -> Architecture | None:
    """What the caller says, else what the plan says; None leaves it to the original."""
    if arch is not None:
        return as_architecture(arch, args)
    if plan.arch is None or plan.arch.get("library") == "caller":
        return None
    return as_architecture(Architecture.from_json(plan.arch, f"the plan in {path}"), args)


def _wrong_weights(stored: Mapping[str, torch.Tensor], converted: Path) -> list[str]:
    differ = differing_weights(stored, converted)
    if not differ:
        return []
    return [
        f"{len(differ)} weights in the converted file are not those of the original, such as "
        f"{differ[0]}"
    ]
