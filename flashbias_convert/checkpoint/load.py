"""Load a converted checkpoint as a patched model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, FlashBiasError, UnknownArchitectureError
from ..plan import Plan
from ..recipe import Recipe
from .align import align
from .architecture import Architecture, ArchLike, as_architecture
from .attach import attach_terms
from .check_terms import DAMAGE, check_terms
from .header import plan_of, require_plan, tied_of
from .healthy import check_loaded
from .kept_terms import split_terms
from .limits import build_from_file
from .made_from import with_made_from
from .open import compute_dtype, open_checkpoint
from .read import read_checkpoint
from .tied import untie_different
from .transformers_names import by_sites


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
        path: a converted file, a folder that holds one, or what any other way of saving made of
            a patched model: `save_pretrained` of transformers, `torch.save` of a state dict.
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
    weights, terms = split_terms(checkpoint.tensors)
    if plan_of(checkpoint.metadata) is None and terms:
        opened = open_checkpoint(
            dataclasses.replace(checkpoint, tensors=weights), arch=arch, without_terms=True
        )
        attach_terms(opened.model, by_sites(terms, opened.model), path, recipes, backend)
        return opened.model.to(device=device, dtype=dtype).eval()
    plan = require_plan(checkpoint.metadata, Path(path))
    tensors = _with_aliases(checkpoint.tensors, tied_of(checkpoint.metadata))
    check_terms(plan, tensors)
    model = build_from_file(_architecture(plan, arch, path), checkpoint)
    model = model.to(dtype=compute_dtype(tensors))
    untie_different(model, tensors)
    try:
        apply_plan(model, plan, recipes=tuple(recipes), backend=backend, empty=True)
        model.load_state_dict(align(with_made_from(tensors, model), model), strict=True)
    except FlashBiasError:
        raise
    except DAMAGE as error:
        raise CheckpointError(f"the plan in {path} cannot be used: {error!r}") from error
    check_loaded(model, path)
    return model.to(device=device, dtype=dtype).eval()


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
