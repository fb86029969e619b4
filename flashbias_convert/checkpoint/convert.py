"""Convert a checkpoint: read, identify, patch, write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import (
    DecompositionError,
    NotFiniteError,
    NothingToConvertError,
    UsageError,
)
from ..options import DecomposeOptions, shard_bytes
from ..plan import Plan
from ..recipe import Recipe
from .architecture import Architecture, ArchLike
from .card import card_path, model_card
from .header import other_entries
from .made_from import without_narrowed
from .mapped import MappedModel, sparing
from .open import OpenedModel
from .open_to_convert import Held, open_to_convert
from .origin import SOURCE_KEY, Origin, note_of_lost
from .outputs import WEIGHTS_NAME, check_output, is_folder, output_path, plan_path
from .publication import require_absent, require_no_folder
from .shelf import Shelf
from .streaming import Copying, write_streamed
from .write import Check, failed, write_file, write_folder

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Conversion:
    """What a conversion did.

    Attributes:
        source: the input.
        architecture: what the model was built from.
        plan: what was decided for every site.
        output: the file or folder that was written; None for a dry run.
        plan_file: the sidecar; None for a dry run.
        notes: what the user should know about how the input was read, and which tensors of it are
            no weights of the model, and so not in the output, or copied and not used.
        held: why all shards were in memory at once, and what that takes; None if they were not, or
            the input was no shards.
        model: the patched model (the original one after a dry run). Of shards that were converted
            one by one it has the weights memory-mapped, in the dtypes of the files.
    """

    source: Path
    architecture: Architecture
    plan: Plan
    output: Path | None
    plan_file: Path | None
    notes: tuple[str, ...]
    held: Held | None
    model: nn.Module = field(repr=False)


def convert_checkpoint(
    path: str | Path,
    output: str | Path | None = None,
    *,
    options: DecomposeOptions | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    recipes: Iterable[Recipe] = (),
    arch: ArchLike | None = None,
    arch_args: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    dry_run: bool = False,
    force: bool = False,
    max_shard_size: int | str | None = None,
    card: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[Plan, nn.Module], None] | None = None,
    check: Check | None = None,
    planner: Callable[[nn.Module], Plan] | None = None,
    copying: Copying | None = None,
    window: Sequence[int] | None = None,
    link: bool = False,
) -> Conversion:
    """Convert a checkpoint and write the result beside it.

    A folder of shards is converted shard by shard, and no more than one is held: the output has
    the same shards, with the same names in them, and one for the terms. If that is interrupted or
    killed, or fails once a shard is finished (a full disk, too little memory), the same call goes
    on where it stopped; the result is the same, byte for byte. Everything is in memory at once
    where `max_shard_size`, `planner`, another device than the CPU or a single file as output is
    asked for, or where weights cannot be memory-mapped or are more than renamed as they are
    loaded; a warning says so before it is done, and `Conversion.held` afterwards. The output then
    has the names of the model.

    Args:
        path: a file, an index of shards, or a folder.
        output: where to write; default ``NAME.flashbias.safetensors`` beside a file, a folder
            ``NAME.flashbias`` beside a folder.
        options: how biases become terms.
        include, exclude, recipes: see `inspect_model`.
        arch, arch_args: the architecture, if the checkpoint does not tell it.
        device: where biases are computed and decomposed; default the CPU.
        dtype: in which they are computed; default float32, or float64 if
            the file holds float64. Weights are written in the dtypes of
            the input, whatever this is.
        dry_run: plan only; nothing is written.
        force: replace an existing output of ours.
        max_shard_size: largest file of weights, such as "5GB" or a number of bytes. The output is
            then a folder, also for a file; it holds shards and their index, or one file if the
            weights fit. Default: one file of any size.
        card: also write a model card with what was measured at every site: ``NAME.flashbias.md``
            beside a file; ``README.md`` in a folder, or ``FLASHBIAS.md`` if it has a README.
        progress: called with (done, total, name) after each site.
        on_plan: called with the plan and the model before anything is written, and also when
            nothing will be.
        check: called with the complete output, a file or folder under a temporary name, before it
            gets its own; if it raises, there is no output. See `verify_files`.
        planner: makes the plan of the opened model in the place of `inspect_model`, such as a
            calibration; `options`, `include` and `exclude` are then its own business.
        copying: called with (bytes done, bytes in all, name of the shard) while shards are copied.
        window: of a dry run that looks at the tensors of biases alone, and builds no model. Such
            a dry run is made without it, too, where no known architecture has the tensors. One
            number for a square, or one for every axis.

        link: of shards, make hard links to those whose bytes stay as they are, where the file
            system can do that. They are one file under two names: who writes to one changes both.

    Raises:
        UsageError: an option that makes no sense, or an output that exists.
        UnknownArchitectureError: the architecture is unknown or ambiguous.
        CheckpointError: the input is missing, damaged or unsafe, or writing failed.
        NothingToConvertError: no site was found, or all were left alone; nothing is written.
        NotFiniteError: NaN or infinity in the bias of a site; nothing is written.
        DecompositionError: every site that was tried failed; nothing is written.
    """
    source = Path(path)
    max_bytes = None if max_shard_size is None else shard_bytes(max_shard_size)
    wanted = None if output is None else Path(output)
    target = output_path(source, wanted, sharded=max_bytes is not None)
    if not dry_run and source.exists():
        check_output(target, source, force)  # before the work, not after it
        if card and target.suffix == ".safetensors":
            require_absent(card_path(target), force)
            require_no_folder(card_path(target))
    if window is not None and (not dry_run or arch is not None or planner is not None):
        raise UsageError(
            "a window is for looking at tensors alone",
            "it goes with inspect, without an architecture and without a calibration",
        )
    together = _why_together(max_bytes, planner is not None, target)
    alone = dry_run and arch is None and planner is None
    opened, held = open_to_convert(
        source, together, tuple(recipes), arch, arch_args, device, dtype, alone, window
    )
    if link and not isinstance(opened, MappedModel):
        reason = held.reason if held is not None else "the input does not lie in shards"
        raise UsageError(f"nothing can be linked: {reason}", "leave out --link")
    choices = {
        "include": tuple(include),
        "exclude": tuple(exclude),
        "recipes": opened.recipes if isinstance(opened, MappedModel) else tuple(recipes),
        "progress": progress,
        **keywords(options or DecomposeOptions()),
    }
    shelf = None
    if isinstance(opened, MappedModel) and not dry_run:
        shelf = Shelf(target.parent)
        plan = _plan_on(shelf, opened, choices, target)
    elif planner is None:
        plan = _plan(opened, choices, dry_run)
    else:
        plan = _planned_by(planner, opened, tuple(recipes), dry_run)
    plan = dataclasses.replace(plan, arch=opened.architecture.to_json())
    if on_plan is not None:
        on_plan(plan, opened.model)
    require_patched(plan)
    notes = opened.checkpoint.notes
    if not dry_run:
        text = model_card(plan, source.resolve().name, target.name) if card else None
        if isinstance(opened, MappedModel):
            write_streamed(
                opened, target, plan, force=force, card=text, check=check, copying=copying,
                shelf=shelf, link=link,
            )  # fmt: skip
        else:
            lost = _write(opened, target, plan, force, max_bytes, text, check)
            notes = (*notes, *note_of_lost(lost))
    return Conversion(
        source=source,
        architecture=opened.architecture,
        plan=plan,
        output=None if dry_run else target,
        plan_file=None if dry_run else plan_path(_weights(target)),
        notes=notes,
        held=held,
        model=opened.model,
    )


def _why_together(max_bytes: int | None, planned: bool, target: Path) -> str | None:
    """Why shards are not converted one by one, as far as the options say it."""
    if planned:
        return "the model has to run, to be planned"
    if max_bytes is not None:
        return "another size of shards is asked for"
    return "one file is asked for" if target.suffix == ".safetensors" else None


def require_patched(plan: Plan) -> None:
    """Raise unless the plan is worth writing: some site is patched, and no bias is damaged.

    Raises:
        NothingToConvertError: all sites were left alone or are unsupported.
        NotFiniteError: the bias of a site holds NaN or infinity. The model was broken before: a
            converted file would only hide it.
        DecompositionError: some failed, so this is not the harmless case.
    """
    failed = plan.with_status("failed")
    damaged = [site for site in failed if site.not_finite]
    if damaged:
        raise NotFiniteError(
            f"{len(damaged)} of {len(plan.sites)} sites have a bias that is not finite, nothing "
            f"was converted; {damaged[0].name}: {damaged[0].reason}",
            f"to convert the other sites: --exclude {damaged[0].name}",
        )
    if plan.patched:
        return
    from ..inspection import NEEDS_FIT

    if failed:
        raise DecompositionError(
            f"no site was converted, {len(failed)} failed; {failed[0].name}: {failed[0].reason}"
        )
    reasons = list(dict.fromkeys(site.reason for site in plan.sites))
    if len(plan.with_status("unsupported")) == len(plan.sites):
        raise NothingToConvertError(
            f"none of the {len(plan.sites)} sites can be converted: {'; '.join(reasons[:3])}"
        )
    # others add no bias, are not wanted or need a fit: to force them would change nothing
    weighed = [s for s in plan.with_status("left alone") if s.n and s.reason != NEEDS_FIT]
    which = "them" if len(weighed) == len(plan.sites) else f"{len(weighed)} of them"
    raise NothingToConvertError(
        f"none of the {len(plan.sites)} sites is worth converting: {'; '.join(reasons[:3])}",
        f"--force-all converts {which} all the same" if weighed else "",
    )


def keywords(options: DecomposeOptions) -> dict[str, Any]:
    """Keyword arguments of `inspect_model`."""
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    # of the schema, and of a calibration, which needs inputs and not these
    del values["version"], values["max_output_error"]
    return values


def _planned_by(
    planner: Callable[[nn.Module], Plan],
    opened: OpenedModel | MappedModel,
    recipes: tuple[Recipe, ...],
    dry_run: bool,
) -> Plan:
    from ..patching import apply_plan

    plan = planner(opened.model)
    if not dry_run:
        apply_plan(opened.model, plan, recipes=recipes)
    return plan


def _plan_on(shelf: Shelf, opened: MappedModel, choices: Mapping[str, Any], target: Path) -> Plan:
    """As `_plan`; terms are kept in a file, and patched modules hold them nowhere else."""
    try:
        with shelf:
            plan = _plan(opened, {**choices, "keep": shelf.put}, False)
    except OSError as error:
        raise failed(target, error) from error
    shelf.forget()
    return plan


def _plan(opened: OpenedModel | MappedModel, choices: Mapping[str, Any], dry_run: bool) -> Plan:
    from ..inspection import inspect_model
    from ..patching import patch_model

    sparingly = sparing(opened.checkpoint) if isinstance(opened, MappedModel) else nullcontext()
    with sparingly:
        return (inspect_model if dry_run else patch_model)(opened.model, **choices)


def _weights(target: Path) -> Path:
    return target if target.suffix == ".safetensors" else target / WEIGHTS_NAME


def _write(
    opened: OpenedModel,
    target: Path,
    plan: Plan,
    force: bool,
    max_bytes: int | None,
    card: str | None,
    check: Check | None,
) -> tuple[str, ...]:
    """Write what is in memory; returns `Origin.lost`."""
    tensors = stored_state(opened)
    originals = {key: tensors[key] for key in opened.stored}
    origin = Origin.of(opened.checkpoint, originals)
    metadata = {**other_entries(opened.checkpoint.metadata), SOURCE_KEY: origin.to_json()}
    if target.suffix == ".safetensors":
        write_file(target, tensors, plan, force=force, metadata=metadata, card=card, check=check)
        return origin.lost
    # what lies beside a file is not its own
    source = opened.checkpoint.folder if is_folder(opened.checkpoint.path) else None
    write_folder(
        target,
        tensors,
        plan,
        source=source,
        force=force,
        metadata=metadata,
        max_bytes=max_bytes,
        check=check,
        card=card,
    )
    return origin.lost


def stored_state(opened: OpenedModel) -> dict[str, Tensor]:
    """The state of the patched model: original tensors as they came, and the terms."""
    dtypes = {key: tensor.dtype for key, tensor in opened.stored.items()}
    state = without_narrowed(opened.model.state_dict(), dtypes)
    return {key: opened.stored.get(key, tensor) for key, tensor in state.items()}
