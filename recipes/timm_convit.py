"""Attention of ConViT: two softmaxes, mixed."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_convit",
    title="ConViT (timm)",
    classes=("timm.models.convit.GPSA",),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="ConViT",
    reason=(
        "it mixes the softmax of its scores with another of its positions, which is no "
        "bias that is added to scores"
    ),
)
