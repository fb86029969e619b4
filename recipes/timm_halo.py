"""Attention in convolutional networks of timm, whose bias is made of queries, block by block."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_halo",
    title="Halo and bottleneck attention (timm)",
    classes=(
        "timm.layers.bottleneck_attn.BottleneckAttn",
        "timm.layers.halo_attn.HaloAttn",
    ),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="HaloNet, BoTNet and the networks of timm's `byoanet`",
    reason=(
        "each call makes its bias of its queries, for rows and columns of relative positions, "
        "in blocks of a convolutional network: no recipe takes it apart"
    ),
)
