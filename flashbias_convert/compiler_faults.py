"""Faults of torch's compiler that a model meets, patched or not: said where it is compiled."""

from __future__ import annotations

import warnings
from functools import cache

import torch

#: releases before this one, as far as they were looked at (2.11 and 2.12)
_MIXES_LAYOUTS_BEFORE = (2, 14)


class CompilerFaultWarning(UserWarning):
    """A model that torch's compiler gets wrong is compiled."""


def warn_of_padded_strides(model: str, device: torch.device) -> None:
    """While a model is compiled for a GPU: say that its outputs may be wrong.

    Inductor pads the strides of large tensors on GPUs, and before torch 2.14 it read a map in
    another layout than it had written it in, where one that lies channels first is normed along its
    channels, padded to whole windows, and cut into them.

    Args:
        model: its name.
        device: where it is.
    """
    if torch.compiler.is_compiling() and device.type == "cuda":
        _warn_while_tracing(model)


def _warn_while_tracing(model: str) -> None:
    # said again of a model that is traced again: it would be as wrong
    if mixes_layouts(torch.__version__) and _pads_strides():
        warnings.warn(
            f"torch {torch.__version__} compiles {model} wrongly, converted or not, where it pads "
            "strides: set torch._inductor.config.comprehensive_padding = False, or compile with "
            "torch 2.14",
            CompilerFaultWarning,
            stacklevel=2,
        )


# torch.compile runs it while it traces
_warn_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def mixes_layouts(version: str) -> bool:
    """Whether a release of torch, such as "2.11.0+cu130", has this fault."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) < _MIXES_LAYOUTS_BEFORE


def _pads_strides() -> bool:
    from torch._inductor import config

    return bool(getattr(config, "comprehensive_padding", True))
