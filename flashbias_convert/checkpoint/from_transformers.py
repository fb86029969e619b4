"""Weights of a transformers model, loaded as transformers itself loads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .architecture import Architecture
from .build import transformers_class
from .offline import hub_offline


def load_pretrained(
    arch: Architecture,
    folder: Path,
    dtype: torch.dtype,
    weights: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """The model of a folder; transformers renames keys and ties weights by its own rules.

    Args:
        arch: its class and config.
        folder: where the weights are.
        dtype: of its parameters.
        weights: take these instead of all that the folder holds.

    Raises:
        CheckpointError: weights are missing or of another shape.
    """
    cls, config = transformers_class(arch)
    try:
        with hub_offline():
            model, info = cls.from_pretrained(
                folder if weights is None else None,
                state_dict=None if weights is None else dict(weights),
                config=config,
                dtype=dtype,
                local_files_only=True,
                weights_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # raises anything for bad files
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    lacking = [*info.get("missing_keys", ()), *info.get("mismatched_keys", ())]
    if lacking:
        raise CheckpointError(
            f"{folder} lacks {len(lacking)} weights of {cls.__name__}, such as {lacking[0]!r}",
            _without_head(model, lacking),
        )
    loaded: nn.Module = model.eval()
    return loaded


def _without_head(model: Any, lacking: list[str]) -> str:
    """What to do where only a head is missing: folders often name the class of their training."""
    import transformers

    if not {name for name, _ in model.named_parameters()}.difference(lacking):
        return "are these the weights of another model?"
    base = transformers.MODEL_MAPPING.get(type(model.config), None)
    below = f"{model.base_model_prefix}."
    if base in (None, type(model)) or any(key.startswith(below) for key in lacking):
        return ""
    return (
        f"its weights may be those of the model without a head: --arch transformers:{base.__name__}"
    )


def in_stored_dtypes(model: nn.Module, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's state in the dtypes of the file, as far as that loses nothing."""
    common = _common_dtype(source)
    state = model.state_dict()
    done: dict[int, Tensor] = {}  # tied tensors must stay one
    return {
        key: done.setdefault(tensor.data_ptr(), _stored(tensor, source.get(key), common))
        if tensor.numel()
        else tensor
        for key, tensor in state.items()
    }


def _stored(tensor: Tensor, original: Tensor | None, common: torch.dtype | None) -> Tensor:
    dtype = common if original is None else original.dtype
    if dtype is None or not tensor.is_floating_point():
        return tensor
    cast = tensor.to(dtype)
    return cast if torch.equal(cast.to(tensor.dtype), tensor) else tensor


def _common_dtype(source: Mapping[str, Tensor]) -> torch.dtype | None:
    counts = Counter(t.dtype for t in source.values() if t.is_floating_point())
    return counts.most_common(1)[0][0] if counts else None
