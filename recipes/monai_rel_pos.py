"""Attention blocks of MONAI with relative positions, which no network of MONAI turns on."""

from __future__ import annotations

from torch import nn

from flashbias_convert.refused import refused
from flashbias_convert.trial import has_parts


def has_positions(module: nn.Module) -> bool:
    """Whether a module of the name was made with `rel_pos_embedding`."""
    return has_parts(module, "rel_positional_embedding", kind=nn.Module)


recipe = refused(
    name="monai_rel_pos",
    title="Attention blocks with relative positions (MONAI)",
    classes=("*.CrossAttentionBlock", "*.SABlock"),
    library="monai",
    tested=">=1.6,<1.7",
    models="attention blocks of MONAI made with `rel_pos_embedding`",
    reason=(
        "no recipe knows its relative positions, which no network of MONAI turns on: they are rows "
        "and columns (of volumes a third axis, too) made of each query, as SAM and torchvision's "
        "MViT have them, whose recipes show how one of your own would hand them on"
    ),
    matches=has_positions,
)
