"""MViTv2 of timm that pools before it projects: a forward that raises, in any configuration."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_pool_first",
    title="MViTv2 with pool_first (timm)",
    classes=("timm.models.mvitv2.MultiScaleAttentionPoolFirst",),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="MViTv2 with `pool_first=True`, which no model of timm's registry has",
    reason=(
        "timm's own forward of it raises: it multiplies queries with keys whose tokens and heads "
        "have not changed places, so there is nothing that a conversion could be held against; "
        "MViTv2 with pool_first=False is converted"
    ),
)
