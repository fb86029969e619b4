"""Small networks of timm with a table of distances, of which nothing was measured."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_small_tables",
    title="Small tables: EfficientFormer V2, EfficientViT (timm)",
    classes=(
        "timm.models.efficientformer_v2.Attention2dDownsample",
        "timm.models.efficientvit_msra.CascadedGroupAttention",
    ),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="the downsampling of EfficientFormer V2, EfficientViT (MSRA)",
    reason=(
        "its bias is a small table that the whole batch shares, and whether a fused kernel gains "
        "anything was not measured; heads of EfficientViT wait for each other, too"
    ),
    impossible=False,
)
