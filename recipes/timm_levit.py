"""Small networks of timm with a table of distances: too short to gain anything."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_levit",
    title="LeViT and its kind (timm)",
    classes=(
        "timm.models.efficientformer.Attention",
        "timm.models.efficientformer_v2.Attention2dDownsample",
        "timm.models.efficientvit_msra.CascadedGroupAttention",
        "timm.models.levit.Attention",
        "timm.models.levit.AttentionDownsample",
    ),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="LeViT, EfficientFormer, the downsampling of EfficientFormer V2, EfficientViT (MSRA)",
    reason=(
        "its bias is a small table, 196 x 196 numbers a head at 224 pixels, that the whole batch "
        "shares: there is nothing to save"
    ),
    impossible=False,
)
