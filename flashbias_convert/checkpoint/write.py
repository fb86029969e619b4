"""Write a converted checkpoint: safetensors, with the plan in its header and in a sidecar."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .. import __version__
from ..errors import CheckpointError
from ..plan import Plan
from .card import card_in, card_path
from .config_entry import mark_config
from .files import INDEX_SUFFIX, SUFFIXES, check_inside
from .header import PLAN_KEY, TIED_KEY, VERSION_KEY
from .outputs import WEIGHTS_NAME, check_folder, check_output, plan_path
from .shards import split
from .staging import Staging

#: looks at what was written and raises if it must not be kept
Check = Callable[[Path], None]

#: weights of other frameworks; a converted folder holds one set of weights
_FOREIGN = (".h5", ".msgpack", ".onnx", ".gguf", ".index", ".tflite", ".ot")


def write_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    plan: Plan,
    *,
    force: bool = False,
    metadata: Mapping[str, str] | None = None,
    check: Check | None = None,
    card: str | None = None,
) -> None:
    """Write a converted file and its sidecar, complete or not at all.

    Args:
        path: the file, ``*.safetensors``.
        tensors: everything to store; tensors that are the same memory are stored once.
        plan: goes into the header and the sidecar.
        force: replace existing files.
        metadata: further entries of the header.
        check: called with the complete file, before it has its name; if it raises, nothing is
            kept.
        card: text of a model card to write beside the file.

    Raises:
        UsageError: a file exists, or its folder cannot be written.
        CheckpointError: the disk is full, or what was written does not read back equal.
    """
    with Staging(force) as staging:
        weights, sidecar = staging.add(path), staging.add(plan_path(path))
        _write_pair(weights, sidecar, tensors, plan, metadata or {}, path)
        if card is not None:
            write_card(staging.add(card_path(path)), card, path)
        if check is not None:
            check(weights)
        try:
            staging.commit()
        except OSError as error:
            raise failed(path, error) from error


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    plan: Plan,
    *,
    source: Path | None = None,
    force: bool = False,
    metadata: Mapping[str, str] | None = None,
    check: Check | None = None,
    max_bytes: int | None = None,
    card: str | None = None,
) -> None:
    """Like `write_file`, but a folder with ``model.safetensors`` and the configs of `source`.

    Args:
        folder: what to make.
        tensors, plan, force, metadata: as for `write_file`.
        source: a folder whose small files are copied. Its weights and indexes are left out, so
            that none is taken for the converted ones.
        max_bytes: largest file of weights; where they are more, they are written in shards
            (``model-00001-of-00002.safetensors``), and at last the index that lists them.
        card: text of a model card; it becomes ``README.md`` unless `source` has one.
    """
    if source is None:
        check_folder(folder, force)
    else:
        check_output(folder, source, force)
    with Staging(force) as staging:
        temporary = staging.add(folder)
        try:
            temporary.mkdir()
            if source is not None:
                copy_small_files(source, temporary)
                mark_config(temporary, plan)
        except OSError as error:
            raise failed(folder, error) from error
        weights = temporary / WEIGHTS_NAME
        if max_bytes is None:
            _write_pair(weights, plan_path(weights), tensors, plan, metadata or {}, folder)
        else:
            _write_shards(weights, tensors, plan, metadata or {}, folder, max_bytes)
        if card is not None:
            write_card(card_in(temporary), card, folder)
        if check is not None:
            check(temporary)
        try:
            staging.commit()
        except OSError as error:
            raise failed(folder, error) from error


def _write_pair(
    weights: Path,
    sidecar: Path,
    tensors: Mapping[str, Tensor],
    plan: Plan,
    metadata: Mapping[str, str],
    final: Path,
) -> None:
    stored, tied = prepare(tensors)
    header = file_header(plan, tied, metadata)
    try:
        save_file(stored, weights, metadata=header)
        sidecar.write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")
        weights.chmod(sidecar.stat().st_mode)  # safetensors makes private files
        compare(weights, stored, header)
    except (OSError, SafetensorError) as error:
        raise failed(final, error) from error


def _write_shards(
    weights: Path,
    tensors: Mapping[str, Tensor],
    plan: Plan,
    metadata: Mapping[str, str],
    final: Path,
    max_bytes: int,
) -> None:
    stored, tied = prepare(tensors)
    header = file_header(plan, tied, metadata)
    found = split(stored, max_bytes)
    sidecar = plan_path(weights)
    try:
        sidecar.write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")
        for name, keys in found.files.items():
            own, path = {key: stored[key] for key in keys}, weights.with_name(name)
            save_file(own, path, metadata=header)
            path.chmod(sidecar.stat().st_mode)
            compare(path, own, header)
        found.write_index(weights.parent)
    except (OSError, SafetensorError) as error:
        raise failed(final, error) from error


def write_card(path: Path, text: str, final: Path) -> None:
    """Write a model card for `final`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise failed(final, error) from error


def file_header(plan: Plan, tied: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """What every file of a conversion has in its header, so that strangers are noticed."""
    header = {**metadata, "format": "pt", VERSION_KEY: __version__}
    header[PLAN_KEY] = json.dumps(plan.to_json())
    if tied:
        header[TIED_KEY] = json.dumps(tied)
    return header


def prepare(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that safetensors can store, and alias -> stored name of those that are tied.

    Raises:
        CheckpointError: a tensor without data (meta), one that is not a plain dense tensor, or
            something else, as some modules leave in their state dict.
    """
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, tensor in tensors.items():
        _require_plain(name, tensor)
        first = seen.setdefault(_memory(tensor), name)
        if first == name:
            stored[name] = tensor.detach().cpu().contiguous()
        else:
            tied[name] = first
    return without_overlap(stored), tied


def _require_plain(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name} is no tensor but a {type(tensor).__name__}; cannot be saved")
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device, it has no values to save")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{name} is not a plain dense tensor and cannot be saved")


def _memory(tensor: Tensor) -> object:
    if not tensor.numel():
        return object()  # empty tensors share an address without being tied
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def without_overlap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors that share part of another's memory; safetensors refuses them."""
    end, out = -1, dict(tensors)
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.numel() and tensor.data_ptr() < end:
            out[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return out


def compare(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    """Raise CheckpointError unless the file holds exactly these tensors, bit for bit."""
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}) != dict(metadata or {}) or set(file.keys()) != set(tensors):
            raise CheckpointError("the written file does not read back: its header differs")
        for name, meant in tensors.items():
            found = file.get_tensor(name)
            if found.dtype != meant.dtype or not torch.equal(_bytes(found), _bytes(meant)):
                raise CheckpointError(f"the written file does not read back: {name} differs")
            if found.shape != meant.shape:
                raise CheckpointError(f"the written file does not read back: shape of {name}")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy what lies beside weights, see `small_files`."""
    for path in small_files(source):
        check_inside(path, source)
        shutil.copyfile(path, folder / path.name)


def small_files(source: Path) -> Iterator[Path]:
    """What lies beside weights: configs, tokenizers, notes; no weights and no plans."""
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.suffix in SUFFIXES + _FOREIGN:
            continue
        if path.name.endswith((INDEX_SUFFIX, ".plan.json")):
            continue
        yield path


def failed(path: Path, error: Exception, kept: Path | None = None) -> CheckpointError:
    """The error for a file that could not be written.

    Args:
        path: the file.
        error: what went wrong.
        kept: where the finished part is that the same call goes on from; None if there is none.
    """
    reason = getattr(error, "strerror", None) or str(error)
    if kept is not None:
        return CheckpointError(
            f"writing failed: {reason}; {kept} keeps the finished shards: the same call goes on "
            "from them",
            f"target: {path}; to give up, delete what is kept",
        )
    return CheckpointError(f"writing failed, nothing was kept: {reason}", f"target: {path}")
