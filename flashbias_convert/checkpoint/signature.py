"""Which architectures a bare state dict fits, by its keys and shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FlashBiasError, UnknownArchitectureError
from .align import fits
from .architecture import Architecture
from .build import build_model

logger = logging.getLogger(__name__)

_PANGU_KEY = "layers.EarthSpecificLayer0.blocks.EarthSpecificBlock0.attention.earth_specific_bias"
_REVEALING = ("relative_coords_table", "attn_mask")


@dataclass(frozen=True)
class Family:
    """Architectures of timm that can be told by their keys.

    Attributes:
        title: for messages.
        matches: whether keys look like the family.
        pattern: the names of its members, as in ``timm.list_models(pattern)``.
        without: names that the pattern should not have matched.
    """

    title: str
    matches: Callable[[Mapping[str, Tensor]], bool]
    pattern: str
    without: str


def _is_swinv2(tensors: Mapping[str, Tensor]) -> bool:
    scales = [t for k, t in tensors.items() if k.endswith("attn.logit_scale")]
    has_mlp = any(k.endswith("attn.cpb_mlp.0.weight") for k in tensors)
    return has_mlp and bool(scales) and all(tuple(t.shape[1:]) == (1, 1) for t in scales)


FAMILIES = (Family("SwinV2", _is_swinv2, "swinv2_*", "swinv2_cr_*"),)


def candidates(tensors: Mapping[str, Tensor]) -> list[Architecture]:
    """Every known architecture that the tensors fit exactly; [] for an unknown family.

    A state dict often fits several: the window of a SwinV2 is in none of its tensors. Buffers
    that the first authors saved (``relative_coords_table``) tell it, where they are present.
    """
    import timm

    if _PANGU_KEY in tensors:
        return _published_pangu(tensors)
    family = next((f for f in FAMILIES if f.matches(tensors)), None)
    if family is None:
        return []
    names = timm.list_models(family.pattern, exclude_filters=family.without)
    logger.info("comparing the state dict with %d architectures of timm", len(names))
    found = [arch for name in names if (arch := _fit(name, tensors)) is not None]
    if len(found) > 1:
        found = [arch for arch in found if _same_values(arch, tensors)]
    return found


def _published_pangu(tensors: Mapping[str, Tensor]) -> list[Architecture]:
    """Pangu-Weather as published, if the tensors fit.

    Raises:
        UnknownArchitectureError: they do not; the grid of another one is in none of its tensors.
    """
    arch = Architecture("flashbias", "pangu", origin="the state dict")
    if fits(tensors, build_model(arch, "meta")):
        return [arch]
    raise UnknownArchitectureError(
        "the tensors are of a Pangu-Weather model of other sizes than the published ones",
        "give its sizes: --arch pangu --arch-args '{\"grid\": [LATITUDES, LONGITUDES], ...}'",
    )


def _fit(name: str, tensors: Mapping[str, Tensor]) -> Architecture | None:
    arch = with_num_classes(Architecture("timm", name, origin="the state dict"), tensors)
    try:
        model = build_model(arch, "meta")
    except FlashBiasError:
        return None
    return arch if fits(tensors, model) and _same_shapes(tensors, model) else None


def with_num_classes(arch: Architecture, tensors: Mapping[str, Tensor]) -> Architecture:
    """A timm architecture with the number of classes that the classifier in the file has."""
    import timm

    if arch.library != "timm" or {"num_classes", "pretrained_cfg"} & set(arch.args):
        return arch
    pretrained = timm.get_pretrained_cfg(arch.name, allow_unregistered=True)
    classifier = getattr(pretrained, "classifier", None)
    if not isinstance(classifier, str):
        return arch
    # the second is the layout of the first authors, without timm's head module
    keys = [f"{classifier}.weight", f"{classifier.rpartition('.')[0] or classifier}.weight"]
    args: dict[str, Any] = {**arch.args, "num_classes": _outputs_of(keys, tensors)}
    return Architecture("timm", arch.name, args, origin=arch.origin)


def _outputs_of(keys: Sequence[str], tensors: Mapping[str, Tensor]) -> int:
    """Rows of the first of these weights that is there, or lies under a prefix; 0 for none."""
    ends = tuple("." + key for key in keys)
    found = [tensors[k] for k in keys if k in tensors]
    found += [tensor for name, tensor in tensors.items() if name.endswith(ends)]
    return int(found[0].shape[0]) if found else 0


def _saved_buffers(tensors: Mapping[str, Tensor], model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a buffer in the file and the same buffer of the model."""
    buffers = dict(model.named_buffers())
    names = [k for k in tensors if k.endswith(_REVEALING) and k in buffers]
    return [(tensors[name], buffers[name]) for name in names]


def _same_shapes(tensors: Mapping[str, Tensor], model: nn.Module) -> bool:
    return all(a.shape == b.shape for a, b in _saved_buffers(tensors, model))


def _same_values(arch: Architecture, tensors: Mapping[str, Tensor]) -> bool:
    # windows that were pretrained at another size differ only in the values of the table
    if not any(k.endswith(_REVEALING) for k in tensors):
        return True
    pairs = _saved_buffers(tensors, build_model(arch))
    return all(torch.allclose(a.float(), b.float(), atol=1e-3) for a, b in pairs)
