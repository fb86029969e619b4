"""Halo attention of timm: blocks of queries, each with a halo of keys and a bias of its own."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_halo",
    title="Halo attention (timm)",
    classes=("timm.layers.halo_attn.HaloAttn",),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="HaloNet and other networks of timm's `byoanet` with halo attention",
    reason=(
        "it cuts a map into blocks that see a halo of keys around them, zeros beyond the edge "
        "included, and makes the bias of the queries of each block, usually for 64 queries and "
        "196 keys: no recipe unfolds keys as it does"
    ),
)
