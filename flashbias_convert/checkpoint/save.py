"""Save a model that was patched in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from ..errors import UsageError
from ..options import shard_bytes
from ..plan import Plan
from ..recipe import Recipe
from .architecture import Architecture, ArchLike, architecture_of, as_architecture
from .build import build_model
from .check_terms import term_keys
from .live_plan import live_plan
from .outputs import check_file, check_folder
from .write import write_file, write_folder


def save_model(
    model: nn.Module,
    path: str | Path,
    *,
    arch: ArchLike | None = None,
    plan: Plan | None = None,
    recipes: Iterable[Recipe] = (),
    force: bool = False,
    max_shard_size: int | str | None = None,
) -> None:
    """Save a patched model as a converted file that `load_model` reads.

    Args:
        model: a patched model.
        path: the file, ``*.safetensors``; a sidecar ``*.plan.json`` appears beside it. With
            `max_shard_size` a folder to make.
        arch: what the model was built from; default what timm (since 1.0.31) or transformers
            remember of it. A function is not saved: `load_model` needs it again.
        plan: what `patch_model` returned, for its reasons and errors; default what the modules
            themselves know.
        recipes: recipes beside the installed ones.
        force: replace existing files.
        max_shard_size: largest file of weights, such as "5GB" or a number of bytes; more are
            written in shards with an index. Default: one file.

    Raises:
        UsageError: nothing is patched, a file exists, `plan` is for another model, or the
            architecture builds another one.
        UnknownArchitectureError: the architecture is one that no library knows.
        StaleTermsError: weights have changed since the model was patched.
        CheckpointError: a tensor has no values (meta), or the disk is full.
    """
    path = Path(path)
    max_bytes = None if max_shard_size is None else shard_bytes(max_shard_size)
    if (path.suffix == ".safetensors") != (max_bytes is None):
        must = "must end in .safetensors" if max_bytes is None else "is a folder, not a file"
        raise UsageError(f"the path {path} {must}")
    (check_file if max_bytes is None else check_folder)(path, force)
    built = as_architecture(arch) if arch is not None else architecture_of(model)
    saved = live_plan(model, plan, recipes)
    saved = dataclasses.replace(saved, arch=built.to_json() if built is not None else None)
    state = model.state_dict()
    if built is not None and built.factory is None:
        _require_built_alike(built, state, saved)
    if max_bytes is None:
        write_file(path, state, saved, force=force)
    else:
        write_folder(path, state, saved, force=force, max_bytes=max_bytes)


def _require_built_alike(arch: Architecture, state: Mapping[str, Tensor], plan: Plan) -> None:
    """Raise UsageError unless the architecture has the tensors of the model, terms aside."""
    terms = {key for site in plan.patched for key in term_keys(site)}
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
