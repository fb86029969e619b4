"""From an architecture to a model with random weights.

Architectures resolve through timm, transformers and torchvision, and through functions that the
caller passed. Nothing that only a file names is ever imported or downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import FlashBiasError, UnknownArchitectureError, UsageError
from .architecture import Architecture, without_code
from .from_torchvision import build_torchvision
from .offline import hub_offline
from .own_models import builder, own_class

#: arguments of timm.create_model that load, download or place something
_NOT_FROM_A_FILE = frozenset(
    {
        "cache_dir",
        "checkpoint_path",
        "device",
        "dtype",
        "exportable",
        "features_only",
        "no_jit",
        "pretrained",
        "pretrained_cfg_overlay",
        "scriptable",
    }
)


def build_model(arch: Architecture, device: torch.device | str = "cpu") -> nn.Module:
    """Build the model, in evaluation mode, with random weights.

    Args:
        arch: what to build.
        device: "cpu", or "meta" for shapes only.

    Raises:
        UnknownArchitectureError: a name that its library does not know, or a function that only
            the caller can supply.
        UsageError: the library refuses the arguments.
    """
    builders = {
        "timm": _timm,
        "torchvision": build_torchvision,
        "transformers": _transformers,
        "flashbias": _own,
        "caller": _caller,
    }
    # a library call must not advance the random numbers of its user
    with torch.random.fork_rng(devices=[]), torch.device(device), _NoMetaInit():
        try:
            model = builders[arch.library](arch)
        except FlashBiasError:
            raise
        except Exception as error:  # libraries raise anything for bad arguments
            raise UsageError(
                f"{arch} (from {arch.origin}) cannot be built: {type(error).__name__}: {error}",
                "check --arch and --arch-args",
            ) from error
    return model.eval()


class _NoMetaInit(TorchFunctionMode):
    """Skips the initialisation of tensors on the meta device, which takes most of a build."""

    _IN_PLACE = frozenset({"uniform_", "normal_", "erfinv_", "clamp_", "mul_", "add_"})

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        skip = getattr(func, "__name__", "") in self._IN_PLACE
        if skip and isinstance(target, torch.Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)


def _timm(arch: Architecture) -> nn.Module:
    import timm

    if not _is_plain(arch.name) or not timm.is_model(arch.name):
        raise UnknownArchitectureError(f"timm has no model {arch.name!r}", _close_names(arch.name))
    forbidden = sorted(_NOT_FROM_A_FILE & set(arch.args))
    if forbidden:
        raise UsageError(f"{arch.origin} may not set {', '.join(forbidden)} of a timm model")
    with hub_offline():
        model: nn.Module = timm.create_model(arch.name, pretrained=False, **arch.args)
    return model


def _is_plain(name: str) -> bool:
    """Whether a name has no source such as "hf-hub:...", which would download."""
    return all(c.isalnum() or c in "_.-" for c in name)


def _close_names(name: str) -> str:
    import difflib

    import timm

    close = difflib.get_close_matches(name, timm.list_models(), n=3)
    return f"did you mean {' or '.join(close)}?" if close else "see timm.list_models()"


def transformers_class(arch: Architecture) -> tuple[type[Any], Any]:
    """The model class and the config of a transformers architecture.

    Raises:
        UnknownArchitectureError: transformers knows no such model type or class, or a part of
            the model would come from a repository.
    """
    import transformers

    args = without_code(arch.args)
    _require_local(args, arch.origin)
    model_type = args.get("model_type")
    own = own_class(model_type, arch.name)
    if model_type is None:
        raise UnknownArchitectureError(
            f"transformers:{arch.name} alone does not say how large the model is, and "
            "no config.json beside the weights does",
            "put its config.json there, or pass that text: --arch-args '{\"model_type\": ...}'",
        )
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnknownArchitectureError(
            f"transformers has no model type {model_type!r} (from {arch.origin})",
            "pass the class and its config: --arch transformers:CLASS --arch-args CONFIG",
        )
    with hub_offline():
        config = transformers.CONFIG_MAPPING[model_type].from_dict(args)
    found = getattr(transformers, arch.name, None) if arch.name.isidentifier() else None
    found = own or found
    if arch.name == "AutoModel":
        found = transformers.MODEL_MAPPING.get(type(config), None)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise UnknownArchitectureError(
            f"transformers has no model class {arch.name!r} for {model_type!r} "
            f"(from {arch.origin})",
            "pass the class and its config: --arch transformers:CLASS --arch-args CONFIG",
        )
    return found, config


def _require_local(config: Mapping[str, Any], origin: str) -> None:
    """Raise UnknownArchitectureError if a config takes a part of the model from elsewhere."""
    for key, value in config.items():
        if key in ("architecture", "backbone") and isinstance(value, str):
            if not _is_plain(value):
                raise UnknownArchitectureError(
                    f"{origin} takes its {key} from {value!r}, and nothing is ever downloaded",
                    "pass arch=, a function that returns the model",
                )
        elif key in ("model_args", "backbone_kwargs") and isinstance(value, Mapping):
            forbidden = sorted(_NOT_FROM_A_FILE & set(value))
            if forbidden:
                raise UnknownArchitectureError(f"{origin} may not set {', '.join(forbidden)}")
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                _require_local(part, origin)


def _transformers(arch: Architecture) -> nn.Module:
    cls, config = transformers_class(arch)
    with hub_offline():
        model: nn.Module = cls(config)
    return model


def _own(arch: Architecture) -> nn.Module:
    return builder(arch.name)(**arch.args)


def _caller(arch: Architecture) -> nn.Module:
    if arch.factory is None:
        raise UnknownArchitectureError(
            f"this model was built by the function {arch.name!r}, which only the caller knows",
            "pass arch=, a function that returns the model",
        )
    model = arch.factory(**arch.args)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{arch.name} must return a module, got {type(model).__name__}")
    return model
