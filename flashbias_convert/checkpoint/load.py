"""Load a converted checkpoint as a patched model, and save a model that was patched in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, FlashBiasError, UnknownArchitectureError, UsageError
from ..plan import Plan, SitePlan
from ..recipe import Recipe
from ..terms import ScoreBias
from .align import align
from .architecture import Architecture, ArchLike, architecture_of, as_architecture
from .build import build_model
from .header import require_plan, tied_of
from .healthy import check_loaded
from .limits import build_from_file
from .live_plan import live_plan
from .open import compute_dtype
from .outputs import check_file
from .read import read_checkpoint
from .tied import untie_different
from .write import write_file

#: what terms of a damaged plan raise when they are built
_DAMAGE = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)


def load_model(
    path: str | Path,
    *,
    arch: ArchLike | None = None,
    recipes: Iterable[Recipe] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> nn.Module:
    """Load a converted checkpoint: a patched model in evaluation mode.

    Args:
        path: a converted file, or a folder that holds one.
        arch: what to build, where the file does not say it: an `Architecture`, "timm:NAME", or a
            function that returns the model. The function must build the same model as before.
        recipes: recipes beside the installed ones.
        device: where the model goes; default the CPU.
        dtype: of its parameters; default float32 (float64 if the file holds float64). Weights
            that are stored in half precision are exact in it.
        backend: "auto", "triton", "sdpa" or "eager".

    Raises:
        CheckpointError: missing, damaged, not converted, of a newer format, of other shapes
            than the architecture, or with codes that point outside their table.
        UnknownArchitectureError: the file does not say what to build, and `arch` is missing.
    """
    from ..patching import apply_plan

    checkpoint = read_checkpoint(path)
    plan = require_plan(checkpoint.metadata, Path(path))
    tensors = _with_aliases(checkpoint.tensors, tied_of(checkpoint.metadata))
    check_terms(plan, tensors)
    model = build_from_file(_architecture(plan, arch, path), checkpoint)
    model = model.to(dtype=compute_dtype(tensors))
    untie_different(model, tensors)
    try:
        apply_plan(model, plan, recipes=tuple(recipes), backend=backend, empty=True)
        model.load_state_dict(align(tensors, model), strict=True)
    except FlashBiasError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(f"the plan in {path} cannot be used: {error!r}") from error
    check_loaded(model, path)
    return model.to(device=device, dtype=dtype).eval()


def save_model(
    model: nn.Module,
    path: str | Path,
    *,
    arch: ArchLike | None = None,
    plan: Plan | None = None,
    recipes: Iterable[Recipe] = (),
    force: bool = False,
) -> None:
    """Save a patched model as a converted file that `load_model` reads.

    Args:
        model: a patched model.
        path: the file, ``*.safetensors``; a sidecar ``*.plan.json`` appears beside it.
        arch: what the model was built from; default what timm or transformers remember of it. A
            function is not saved: `load_model` needs it again.
        plan: what `patch_model` returned, for its reasons and errors; default what the modules
            themselves know.
        recipes: recipes beside the installed ones.
        force: replace existing files.

    Raises:
        UsageError: nothing is patched, a file exists, `plan` is for another model, or the
            architecture builds another one.
        UnknownArchitectureError: the architecture is one that no library knows.
        StaleTermsError: weights have changed since the model was patched.
        CheckpointError: a tensor has no values (meta), or the disk is full.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UsageError(f"the path {path} must end in .safetensors")
    check_file(path, force)
    built = as_architecture(arch) if arch is not None else architecture_of(model)
    saved = live_plan(model, plan, recipes)
    saved = dataclasses.replace(saved, arch=built.to_json() if built is not None else None)
    state = model.state_dict()
    if built is not None and built.factory is None:
        _require_built_alike(built, state, saved)
    write_file(path, state, saved, force=force)


def _require_built_alike(arch: Architecture, state: Mapping[str, Tensor], plan: Plan) -> None:
    """Raise UsageError unless the architecture has the tensors of the model, terms aside."""
    terms = {key for site in plan.patched for key, _ in _term_tensors(site)}
    try:
        model = build_model(arch, "meta")
    except UsageError:  # some models compute while they are built
        model = build_model(arch)
    wanted = {key: tensor.shape for key, tensor in model.state_dict().items()}
    found = {key: tensor.shape for key, tensor in state.items() if key not in terms}
    keys = sorted(wanted.keys() | found.keys())
    differ = [key for key in keys if wanted.get(key) != found.get(key)]
    if differ:
        raise UsageError(
            f"{arch} (from {arch.origin}) does not build this model: "
            f"{len(differ)} tensors differ, such as {differ[0]}",
            "was it changed after it was built? pass arch=, a function that returns it",
        )


def check_terms(plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the terms of the plan are the tensors in the file.

    This comes before anything of the plan's sizes is allocated.
    """
    for site in plan.patched:
        for key, info in _term_tensors(site):
            tensor = tensors.get(key)
            if tensor is None:
                raise CheckpointError(f"the plan names {key}, which the file lacks")
            found = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            if found != info:
                raise CheckpointError(f"the plan says that {key} is {info}, the file has {found}")


def _term_tensors(site: SitePlan) -> list[tuple[str, Any]]:
    prefix = f"{site.name}.score_bias" if site.name else "score_bias"
    try:
        if not site.spec:
            return []
        tensors = [
            (f"{prefix}.{term['name']}.{name}", info)
            for term in site.spec["terms"]
            for name, info in term["tensors"].items()
        ]
        layout = {"shape": [len(ScoreBias.layout(site.spec).encode())], "dtype": "uint8"}
        return [*tensors, (f"{prefix}.layout", layout)]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the plan of {site.name!r} is damaged: {error!r}") from error


def _with_aliases(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    lost = [stored for stored in tied.values() if stored not in tensors]
    if lost:
        raise CheckpointError(f"a tied tensor is missing: {lost[0]}")
    return {**tensors, **{alias: tensors[stored] for alias, stored in tied.items()}}


def _architecture(plan: Plan, arch: ArchLike | None, path: str | Path) -> Architecture:
    if arch is not None:
        return as_architecture(arch)
    if plan.arch is None:
        raise UnknownArchitectureError(
            f"{path} does not say what model to build", "pass arch=, a function that returns it"
        )
    return Architecture.from_json(plan.arch, f"the plan in {path}")
