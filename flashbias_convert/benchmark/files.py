"""Both models of a benchmark, from a converted file or from an original one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint import Checkpoint, load_model, open_model, read_checkpoint, read_plan
from ..checkpoint.architecture import ArchLike
from ..checkpoint.convert import keywords, require_patched
from ..checkpoint.header import plan_of
from ..checkpoint.kept_terms import split_terms, stale_sites
from ..checkpoint.origin import SOURCE_KEY, Origin
from ..checkpoint.outputs import same_file
from ..checkpoint.weights import differing_weights
from ..errors import FlashBiasError, UsageError
from ..options import DecomposeOptions
from ..patching import patch_model, unpatch_model
from ..plan import Plan
from ..recipe import Recipe
from ..verification.files import planned_architecture


@dataclass(frozen=True, eq=False)
class Pair:
    """What is compared.

    Attributes:
        original: in evaluation mode.
        converted: the same model, patched.
        plan: of the conversion.
        source: where they came from, in words.
        folder: may hold a tokenizer or the config of an image processor.
        is_file: whether the conversion was read from a file.
    """

    original: nn.Module
    converted: nn.Module
    plan: Plan
    source: str
    folder: Path
    is_file: bool


@dataclass(frozen=True)
class Choices:
    """How an original is converted in memory; see `inspect_model`."""

    options: DecomposeOptions = DecomposeOptions()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


def load_pair(
    path: str | Path,
    *,
    original: str | Path | None = None,
    choices: Choices | None = None,
    tokens: int | None = None,
    arch: ArchLike | None = None,
    arch_args: Mapping[str, Any] | None = None,
    recipes: Iterable[Recipe] = (),
    progress: Callable[[int, int, str], None] | None = None,
) -> Pair:
    """Load a converted file and its original, or load an original and convert it in memory.

    Args:
        path: a converted file or folder, or an original checkpoint.
        original: the original of a converted file. Default: the one that lies beside it; without
            one, the converted file's own weights, which are those of the original.
        choices: how to convert an original.
        tokens: length to plan for, where the model leaves it open.
        arch, arch_args: the architecture, where the files do not tell it.
        recipes: recipes beside the installed ones.
        progress: called with (done, total, name) after each site that is decomposed.

    Raises:
        UsageError: an original for an original, choices for what is converted already, or an
            original that the converted file was not made from.
        CheckpointError, UnknownArchitectureError, NothingToConvertError: see `open_model`,
            `load_model` and `convert_checkpoint`.
    """
    path, recipes, choices = Path(path), tuple(recipes), choices or Choices()
    checkpoint = read_checkpoint(path)
    if _is_converted(checkpoint):
        if choices != Choices():
            raise UsageError(
                f"{path} was converted already, and options say how to convert",
                "leave them out, or name the original",
            )
        given = None if original is None else Path(original)
        return _converted(path, checkpoint, given, arch, arch_args, recipes)
    if original is not None:
        raise UsageError(f"{path} is not converted, so it is the original", "leave out --original")
    opened = open_model(path, arch=arch, arch_args=arch_args)
    converted = copy.deepcopy(opened.model)
    plan = patch_model(
        converted,
        include=choices.include,
        exclude=choices.exclude,
        recipes=recipes,
        progress=progress,
        **keywords(replace(choices.options, tokens=tokens)),
    )
    require_patched(plan)
    folder = opened.checkpoint.folder
    return Pair(opened.model, converted, plan, f"{path}, converted in memory", folder, False)


def _is_converted(checkpoint: Checkpoint) -> bool:
    if plan_of(checkpoint.metadata) is not None:
        return True
    _, terms = split_terms(checkpoint.tensors)
    return bool(terms) and not stale_sites(terms)


def _converted(
    path: Path,
    checkpoint: Checkpoint,
    original: Path | None,
    arch: ArchLike | None,
    arch_args: Mapping[str, Any] | None,
    recipes: tuple[Recipe, ...],
) -> Pair:
    plan = read_plan(path)
    known = planned_architecture(plan, arch, arch_args, path)
    # the maker's function must be passed again, everything else is in the plan
    again = known if known is not None and known.factory is not None else None
    converted = load_model(path, arch=again, recipes=recipes)
    if original is not None:
        opened = open_model(original, arch=known)
        _require_same_weights(opened.stored, path, original)
        folder = opened.checkpoint.folder
        return Pair(opened.model, converted, plan, f"{path}, original {original}", folder, True)
    beside = original_beside(path, checkpoint)
    if beside is not None:
        try:
            opened = open_model(beside, arch=known)
            _require_same_weights(opened.stored, path, beside)
            source = f"{path}, original {beside}, found beside it"
            return Pair(opened.model, converted, plan, source, beside.parent, True)
        except FlashBiasError:  # another file of that name: its own weights will do
            pass
    model = copy.deepcopy(converted)
    unpatch_model(model)
    source = f"{path}, original from its own weights"
    return Pair(model, converted, plan, source, checkpoint.folder, True)


def original_beside(path: Path, converted: Checkpoint) -> Path | None:
    """The checkpoint that a converted file or folder says it was made from, if it is there."""
    remembered = converted.metadata.get(SOURCE_KEY)
    files = () if remembered is None else Origin.from_json(remembered).files
    path = path.resolve() if path.name in ("", "..") else path
    names = [path.name.removesuffix(".flashbias")] if path.is_dir() else []
    names += [Path(files[0]).name] if len(files) == 1 else []
    near = [path.with_name(name) for name in names]
    return next((p for p in near if p.exists() and not same_file(p, path)), None)


def _require_same_weights(stored: Mapping[str, Any], converted: Path, original: Path) -> None:
    differ = differing_weights(stored, converted)
    if differ:
        raise UsageError(
            f"{converted} was not made from {original}: {len(differ)} weights differ, such as "
            f"{differ[0]}",
            "name the original with --original",
        )
