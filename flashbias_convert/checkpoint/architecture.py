"""What a model is built from, as data."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from torch import nn

from ..composed import PATCHED_PREFIX
from ..errors import CheckpointError, UnknownArchitectureError, UsageError
from ..swap import original_class
from .own_models import BUILT, TRANSFORMERS

#: origin of what no file says
CALLER = "the caller"

Library = Literal["timm", "transformers", "torchvision", "flashbias", "caller"]

#: entries of a transformers config that name code, kernels or repositories to fetch
_CODE = frozenset({"_name_or_path", "auto_map", "custom_pipelines", "trust_remote_code"})
_CODE_PARTS = ("attn_implementation", "experts_implementation", "use_kernels", "kernel_config")


@dataclass(frozen=True)
class Architecture:
    """How to build a model.

    Attributes:
        library: who builds it: "timm", "transformers", "torchvision", "flashbias" for a model of
            this package, or "caller" for a function that only the caller knows.
        name: model name in timm, torchvision or here, class name in transformers, or a label for
            the function.
        args: JSON values: keyword arguments, or the config for transformers.
        factory: the function of "caller"; never saved.
        origin: where this was learnt, for messages.
    """

    library: Library
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    factory: Callable[..., nn.Module] | None = field(default=None, compare=False, repr=False)
    origin: str = field(default=CALLER, compare=False)

    def __str__(self) -> str:
        return self.name if self.library == "caller" else f"{self.library}:{self.name}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without the function."""
        return {"library": self.library, "name": self.name, "args": dict(self.args)}

    @classmethod
    def from_json(cls, data: Any, origin: str) -> Self:
        """Inverse of `to_json`; raises CheckpointError for anything else."""
        if not isinstance(data, Mapping) or data.get("library") not in get_args(Library):
            raise CheckpointError(f"{origin} describes no known kind of architecture: {data!r}")
        name, args = data.get("name"), data.get("args", {})
        if not isinstance(name, str) or not isinstance(args, Mapping):
            raise CheckpointError(f"{origin} describes a damaged architecture: {data!r}")
        return cls(data["library"], name, dict(args), origin=origin)


#: what `arch=` takes
ArchLike = Architecture | str | Callable[..., nn.Module]


def as_architecture(arch: ArchLike, args: Mapping[str, Any] | None = None) -> Architecture:
    """The architecture that a caller named.

    Args:
        arch: an Architecture, "timm:NAME", "torchvision:NAME", "transformers:CLASS", the name of
            a model of this package, "package.module:function" or a function that returns the
            model. The function's module is imported.
        args: keyword arguments, or the config of a transformers model; added to an Architecture's.

    Raises:
        UsageError: a string of another form, or a function that does not exist.
    """
    args = dict(args or {})
    if isinstance(arch, Architecture):
        merged = {**arch.args, **args}
        return Architecture(arch.library, arch.name, merged, arch.factory, arch.origin)
    if callable(arch):
        label = getattr(arch, "__qualname__", type(arch).__name__)
        return Architecture("caller", label, args, arch)
    if arch in BUILT:
        return Architecture("flashbias", arch, args)
    if arch in TRANSFORMERS:
        return Architecture("transformers", TRANSFORMERS[arch][1], {"model_type": arch, **args})
    library, colon, name = arch.partition(":")
    if not colon or not library or not name:
        raise UsageError(
            f"cannot read the architecture {arch!r}",
            "write timm:NAME, torchvision:NAME, transformers:CLASS, package.module:function, or "
            + " or ".join([*TRANSFORMERS, *BUILT]),
        )
    if library == "timm":
        return Architecture("timm", name, args)
    if library == "torchvision":
        return Architecture("torchvision", name, args)
    if library == "transformers":
        return Architecture("transformers", name, args)
    return Architecture("caller", arch, args, _import_factory(library, name))


def _import_factory(module: str, name: str) -> Callable[..., nn.Module]:
    try:
        factory = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UsageError(f"cannot import {module}: {error}") from error
    except AttributeError as error:
        raise UsageError(f"module {module} has no {name!r}") from error
    if not callable(factory):
        raise UsageError(f"{module}:{name} is not a function or class")
    return factory


def architecture_of(model: nn.Module) -> Architecture | None:
    """How a model in memory was built, where its library remembers it."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_diff_dict") and hasattr(config, "model_type"):
        found = from_config(config.to_dict(), "the model's config")
        cls = original_class(model)
        if not cls.__module__.startswith(("transformers.", "flashbias_convert.models.")):
            return found
        # the config learns its class only when the model is saved
        return dataclasses.replace(found, name=cls.__name__)
    own = getattr(model, "flashbias_arch", None)
    if isinstance(own, Mapping):
        return Architecture("flashbias", own["name"], dict(own["args"]), origin="the model")
    pretrained = getattr(model, "pretrained_cfg", None)
    args = getattr(model, "_model_args", None)
    if not isinstance(pretrained, Mapping) or args is None or "architecture" not in pretrained:
        return None
    saved = {**args, "pretrained_cfg": pretrained_cfg_of(pretrained)}
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int) and classes != args.get(
        "num_classes", pretrained.get("num_classes")
    ):
        saved["num_classes"] = classes  # the classifier was reset
    return Architecture("timm", pretrained["architecture"], saved, origin="the model")


def pretrained_cfg_of(pretrained_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """timm's pretrained_cfg without what is empty, names a file, or is unknown to timm."""
    from timm.models import PretrainedCfg

    known = {f.name for f in dataclasses.fields(PretrainedCfg)} - {"file", "source", "state_dict"}
    return {k: v for k, v in pretrained_cfg.items() if k in known and v is not None}


def from_config(config: Mapping[str, Any], origin: str) -> Architecture:
    """The architecture in the content of a transformers ``config.json``; see `without_code`.

    Raises:
        UnknownArchitectureError: the config names none.
    """
    classes = config.get("architectures") or ["AutoModel"]
    known = isinstance(classes, list) and isinstance(classes[0], str)
    if not known or not isinstance(config.get("model_type"), str):
        raise UnknownArchitectureError(f"{origin} names no architecture")
    # of a patched model that transformers saved by itself, before patched models kept their names
    name = classes[0].removeprefix(PATCHED_PREFIX)
    return Architecture("transformers", name, without_code(config), origin=origin)


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """A transformers config without what could fetch or run code, in its sub-configs too."""
    return {k: _without_code(v) for k, v in config.items() if not _names_code(k)}


def _without_code(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_code(value)
    return [_without_code(v) for v in value] if isinstance(value, list) else value


def _names_code(key: Any) -> bool:
    return key in _CODE or any(part in str(key) for part in _CODE_PARTS)
