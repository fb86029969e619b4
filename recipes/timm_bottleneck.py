"""Bottleneck attention of timm: all of a small map, with a bias that is made of the queries."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_bottleneck",
    title="Bottleneck attention (timm)",
    classes=("timm.layers.bottleneck_attn.BottleneckAttn",),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="BoTNet and other networks of timm's `byoanet` with bottleneck attention",
    reason=(
        "its bias is the product of the queries with rows and columns of relative positions, as "
        "in SAM, but of a map whose channels come first, in the last blocks of a convolutional "
        "network: no recipe is written for these few calls"
    ),
)
