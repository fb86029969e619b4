"""From a checkpoint to the architecture that its tensors belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, UnknownArchitectureError
from .architecture import (
    Architecture,
    ArchLike,
    as_architecture,
    from_config,
    pretrained_cfg_of,
    without_code,
)
from .header import plan_of
from .mdlus import saved_class
from .own_models import BUILT, TRANSFORMERS
from .read import Checkpoint
from .signature import candidates, with_num_classes
from .training_config import from_training

_HINT = (
    "name it with --arch timm:NAME or --arch package.module:function; a model of transformers "
    "needs its config.json beside the weights"
)


def identify(
    checkpoint: Checkpoint, arch: ArchLike | None = None, args: Mapping[str, Any] | None = None
) -> Architecture:
    """The architecture of a checkpoint.

    The first of these that says something decides: the caller, our own plan in the header, the
    ``config.json`` beside the weights, what a training script saved with them, and at last the
    names and shapes of the tensors, if exactly one known architecture has them.

    Args:
        checkpoint: what was read.
        arch: what the caller knows.
        args: keyword arguments that the caller adds.

    Raises:
        UnknownArchitectureError: nothing is known, or several architectures fit; then
            `candidates` lists them.
        UsageError: `arch` cannot be understood.
    """
    if arch is not None and not _is_told_by_its_config(arch, checkpoint):
        given = as_architecture(arch, args)
        return with_num_classes(_with_config(given, checkpoint), checkpoint.tensors)
    found = _from_plan(checkpoint) or _from_config_file(checkpoint) or from_training(checkpoint)
    if found is None:
        found = _from_tensors(checkpoint)
    return as_architecture(found, args)


def _with_config(arch: Architecture, checkpoint: Checkpoint) -> Architecture:
    """A class of transformers alone says no sizes: those of the ``config.json`` hold."""
    config = checkpoint.config or {}
    if arch.library != "transformers" or "model_type" not in config:
        return arch
    if arch.args.get("model_type", config["model_type"]) != config["model_type"]:
        return arch
    return dataclasses.replace(arch, args={**without_code(config), **arch.args})


def _is_told_by_its_config(arch: ArchLike, checkpoint: Checkpoint) -> bool:
    """Whether ``config.json`` is for the model of ours that the caller named: it knows sizes."""
    config = checkpoint.config or {}
    return (
        isinstance(arch, str)
        and arch in {*BUILT, *TRANSFORMERS}
        and arch
        in (
            config.get("model_type"),
            config.get("architecture"),
        )
    )


def _from_plan(checkpoint: Checkpoint) -> Architecture | None:
    plan = plan_of(checkpoint.metadata)
    if plan is None or plan.arch is None:
        return None
    return Architecture.from_json(plan.arch, f"the plan in {checkpoint.path}")


def _from_config_file(checkpoint: Checkpoint) -> Architecture | None:
    config = checkpoint.config
    if not config:
        return None
    origin = str(checkpoint.folder / "config.json")
    if config.get("library") == "flashbias":
        return _from_own_config(config, origin)
    if "architecture" in config:
        return _from_timm_config(config, origin)
    return from_config(config, origin) if "model_type" in config else None


def _from_own_config(config: Mapping[str, Any], origin: str) -> Architecture:
    data = {"library": "flashbias", "name": config.get("architecture"), "args": config.get("args")}
    return Architecture.from_json(data, origin)


def _from_timm_config(config: Mapping[str, Any], origin: str) -> Architecture:
    """The layout that timm writes for hubs; an older one has everything at the top level."""
    name = config["architecture"]
    pretrained = config.get("pretrained_cfg", config)
    args = config.get("model_args", {})
    if not (isinstance(pretrained, Mapping) and isinstance(args, Mapping) and _is_name(name)):
        raise CheckpointError(f"{origin} is not a config of timm")
    cfg = {**pretrained_cfg_of(pretrained), "architecture": name}
    if "num_classes" in config:
        cfg["num_classes"] = config["num_classes"]
    return Architecture("timm", name, {**args, "pretrained_cfg": cfg}, origin=origin)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name)


def _from_tensors(checkpoint: Checkpoint) -> Architecture:
    found = candidates(checkpoint.tensors)
    if len(found) == 1:
        return found[0]
    if not found:
        says = "does not say which architecture it is for"
        if "__module__" in checkpoint.extras:
            says = f"is for {saved_class(checkpoint.extras)}, which is not built from a file"
        raise UnknownArchitectureError(
            f"{checkpoint.path} {says}, and its tensors fit none that is known", _HINT
        )
    names = tuple(str(arch) for arch in found)
    raise UnknownArchitectureError(
        f"the tensors of {checkpoint.path} fit {len(found)} architectures: {', '.join(names)}",
        f"they differ in what no tensor shows, such as the window; choose: --arch {names[0]}",
        names,
    )
