"""Models that this package brings along, by the names that files and `--arch` use for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import UnknownArchitectureError

_MODELS = "flashbias_convert.models"

#: name -> module with a function `build(**args)`
BUILT = {"pangu": f"{_MODELS}.pangu"}
#: model_type of a transformers config -> module with its classes, and the class that is meant
TRANSFORMERS = {"alibi_gpt2": (f"{_MODELS}.alibi_gpt2", "AlibiGPT2LMHeadModel")}


def builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds a model of `BUILT`.

    Raises:
        UnknownArchitectureError: there is no such model.
    """
    if name not in BUILT:
        known = ", ".join(sorted(BUILT))
        raise UnknownArchitectureError(f"there is no model {name!r}", f"known are {known}")
    build: Callable[..., nn.Module] = importlib.import_module(BUILT[name]).build
    return build


def own_class(model_type: Any, name: str) -> type[nn.Module] | None:
    """A class of ours that a transformers config names; registers its config.

    Args:
        model_type: of the config.
        name: of the class; "AutoModel" stands for the one that the type is known by.
    """
    if model_type not in TRANSFORMERS:
        return None
    module, usual = TRANSFORMERS[model_type]
    found = getattr(importlib.import_module(module), usual if name == "AutoModel" else name, None)
    return found if isinstance(found, type) else None
