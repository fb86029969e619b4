"""Neighbourhood attention (NATTEN): a table of relative positions around each query."""

from __future__ import annotations

from torch import nn

from flashbias_convert.recipe import Site
from flashbias_convert.refused import refused
from flashbias_convert.trial import has_parts

_NAMES = ("", "1D", "2D", "3D")


def has_table(site: Site) -> bool:
    """Whether it adds a bias: newer versions of NATTEN have none, and older ones may."""
    return getattr(site.module, "rpb", None) is not None


def looks_like_it(module: nn.Module) -> bool:
    """Whether a module of the name has the parts."""
    return has_parts(module, "kernel_size", "dilation")


recipe = refused(
    name="neighborhood_attention",
    title="Neighbourhood attention of any repository (NATTEN)",
    classes=tuple(f"*.NeighborhoodAttention{name}" for name in _NAMES),
    library="torch",
    tested=">=2.11,<2.15",
    models="NAT, DiNAT and others with a table `rpb`",
    reason=(
        "each query sees the keys around it alone, and NATTEN's own kernel looks up their bias: "
        "there is no matrix of scores over all keys whose bias factors could replace"
    ),
    when=has_table,
    matches=looks_like_it,
    with_what="transformers' DiNAT, classes of the same interface",
)
