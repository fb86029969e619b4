"""Attention of timm that mixes its heads: no fused kernel computes it."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_talking_heads",
    title="Talking heads: CaiT, EfficientFormer V2 (timm)",
    classes=(
        "timm.models.cait.TalkingHeadAttn",
        "timm.models.efficientformer_v2.Attention2d",
    ),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="CaiT, EfficientFormer V2",
    reason=(
        "it mixes its heads before and after the softmax, so no head can be computed "
        "without the scores of all others"
    ),
)
