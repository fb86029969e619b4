"""From a converted checkpoint back to the original one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, UsageError
from .check_terms import term_keys
from .config_entry import unmark_config
from .header import other_entries, require_plan, tied_of
from .origin import SOURCE_KEY, Origin
from .outputs import WEIGHTS_NAME, same_file
from .publication import require_absent, require_no_folder
from .read import Checkpoint, read_checkpoint
from .staging import Staging
from .write import compare, copy_small_files, failed, without_overlap


@dataclass(frozen=True)
class Restored:
    """What was restored.

    Attributes:
        output: the file or folder that was written.
        tensors: how many tensors it holds.
        notes: what differs from the source, in words.
    """

    output: Path
    tensors: int
    notes: tuple[str, ...]


def restore_checkpoint(
    path: str | Path, output: str | Path | None = None, *, force: bool = False
) -> Restored:
    """Write the original tensors back, without terms, under their names in the source.

    Args:
        path: a converted file, or a folder that holds one.
        output: where to write; default ``NAME.restored.safetensors`` beside a file, a folder
            ``NAME.restored`` beside a folder. A folder gets the config files, too.
        force: replace an existing file; a folder is never replaced.

    Raises:
        UsageError: an output that exists, or has no name that suits.
        CheckpointError: not converted, damaged, changed since the conversion, with terms that were
            trained, or writing failed.
    """
    source = Path(path)
    checkpoint = read_checkpoint(source)
    tensors, metadata, notes = _original(checkpoint, source)
    target = restored_path(source, None if output is None else Path(output))
    _check_output(target, source, force)
    if target.suffix == ".safetensors":
        _write_file(target, tensors, metadata, force)
    else:
        _write_folder(target, tensors, metadata, checkpoint.folder, force)
    return Restored(target, len(tensors), notes)


_Original = tuple[dict[str, Tensor], dict[str, str] | None, tuple[str, ...]]


def _original(checkpoint: Checkpoint, path: Path) -> _Original:
    """Tensors and metadata of the source, and what differs from it."""
    plan = require_plan(checkpoint.metadata, path)
    trained = [site.name for site in plan.patched if site.trains_terms()]
    if trained:
        raise CheckpointError(
            f"the terms of {len(trained)} sites in {path} were trained, such as {trained[0]!r}: "
            "there is no original to go back to"
        )
    terms = {key for site in plan.patched for key in term_keys(site)}
    stored = {key: t for key, t in checkpoint.tensors.items() if key not in terms}
    in_files = {checkpoint.names[key]: tensor for key, tensor in stored.items()}
    in_files |= checkpoint.unused
    remembered = checkpoint.metadata.get(SOURCE_KEY)
    if remembered is None:
        metadata = other_entries(checkpoint.metadata)
        note = "the file does not say how its source named its tensors: they keep their names"
        return in_files, metadata, (note,)
    origin = Origin.from_json(remembered)
    tied = tied_of(checkpoint.metadata)
    lost = [name for name in tied.values() if name not in stored]
    if lost:
        raise CheckpointError(f"a tied tensor is missing: {lost[0]}")
    # a tied name can be another tensor's own in the files, which the source had
    every = {**{alias: stored[name] for alias, name in tied.items()}, **in_files}
    return origin.restore(every), origin.metadata, tuple(_notes(origin))


def _notes(origin: Origin) -> list[str]:
    notes = []
    if len(origin.files) > 1:
        notes.append(f"the source had {len(origin.files)} shards, this is one file")
    elif not origin.files[0].endswith(".safetensors"):
        notes.append(f"the source was {origin.files[0]}; only its weights are restored")
    if origin.lost:
        notes.append(
            f"{len(origin.lost)} tensors of the source were no weights of the model and are not "
            f"restored, such as {origin.lost[0]}"
        )
    return notes


# -- where to ------------------------------------------------------------------------------


def restored_path(source: Path, output: Path | None) -> Path:
    """Where to write what is restored from `source`.

    Raises:
        UsageError: a file name for a folder, or one of another kind.
    """
    if output is None:
        source = source.resolve() if source.name in ("", "..") else source
        name = source.name.removesuffix(".safetensors").removesuffix(".flashbias") + ".restored"
        return source.with_name(name if source.is_dir() else f"{name}.safetensors")
    if source.is_dir() or output.suffix == ".safetensors":
        return output
    if output.is_dir():
        return output / restored_path(source, None).name
    raise UsageError(f"the output {output} must end in .safetensors")


def _check_output(target: Path, source: Path, force: bool) -> None:
    inside = source.is_dir() and same_file(target.parent, source)
    if same_file(target, source) or inside:
        raise UsageError(f"the output {target} would change the input", "choose another --output")
    if target.suffix == ".safetensors":
        require_no_folder(target)
    elif target.is_dir():
        raise UsageError(
            f"{target} exists, and a folder is never replaced by a restored one",
            "choose another --output, or remove it first",
        )
    require_absent(target, force)


# -- writing -------------------------------------------------------------------------------


def _write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None, force: bool
) -> None:
    with Staging(force) as staging:
        temporary = staging.add(path)
        _write_weights(temporary, tensors, metadata, path)
        _commit(staging, path)


def _write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str] | None,
    source: Path,
    force: bool,
) -> None:
    with Staging(force) as staging:
        temporary = staging.add(folder)
        try:
            temporary.mkdir()
            copy_small_files(source, temporary)
            unmark_config(temporary)
        except OSError as error:
            raise failed(folder, error) from error
        _write_weights(temporary / WEIGHTS_NAME, tensors, metadata, folder)
        _commit(staging, folder)


def _write_weights(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None, final: Path
) -> None:
    stored = without_overlap({k: t.contiguous() for k, t in tensors.items()})
    try:
        path.touch()  # with the usual permissions; safetensors makes private files
        mode = path.stat().st_mode
        save_file(stored, path, metadata=metadata)
        path.chmod(mode)
        compare(path, stored, metadata)
    except (OSError, SafetensorError) as error:
        raise failed(final, error) from error


def _commit(staging: Staging, final: Path) -> None:
    try:
        staging.commit()
    except OSError as error:
        raise failed(final, error) from error
