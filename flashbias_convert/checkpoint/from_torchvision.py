"""Models of torchvision, which need not be installed."""

from __future__ import annotations

import difflib
import inspect

from torch import nn

from ..errors import UnknownArchitectureError, UsageError
from .architecture import Architecture

#: arguments of its functions that load, or download, weights
_LOADING = ("weights", "weights_backbone", "pretrained", "pretrained_backbone", "progress")


def build_torchvision(arch: Architecture) -> nn.Module:
    """The model that ``torchvision.models.get_model`` builds, with random weights.

    Raises:
        UnknownArchitectureError: torchvision is not installed, or has no such model.
        UsageError: arguments that would load weights.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise UnknownArchitectureError(
            f"{arch} (from {arch.origin}) needs torchvision: {error}", "pip install torchvision"
        ) from error
    known = models.list_models()
    if arch.name not in known:
        close = difflib.get_close_matches(arch.name, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "see torchvision.models"
        raise UnknownArchitectureError(f"torchvision has no model {arch.name!r}", hint)
    forbidden = sorted(set(_LOADING) & set(arch.args))
    if forbidden:
        raise UsageError(f"{arch.origin} may not set {', '.join(forbidden)} of a torchvision model")
    # a default of None is not given by every model: some download a backbone
    takes = inspect.signature(models.get_model_builder(arch.name)).parameters
    none = {name: None for name in ("weights", "weights_backbone") if name in takes}
    model: nn.Module = models.get_model(arch.name, **none, **arch.args)
    return model
