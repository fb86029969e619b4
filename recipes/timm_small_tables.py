"""Small networks of timm with a table of distances, where a fused kernel saves microseconds."""

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
        "its bias is a small table that the whole batch shares: for 256 images in bf16 on an H200 "
        "a fused kernel takes 5 to 14 us instead of 9 to 32 a head of EfficientViT, whose heads "
        "wait for each other, and 38 instead of 163 for the one downsampling of EfficientFormer V2 "
        "(scripts/bench_small_tables.py): no recipe is written for so little"
    ),
    impossible=False,
)
