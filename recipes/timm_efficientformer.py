"""EfficientFormer of timm, whose 49 tokens gain next to nothing."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="timm_efficientformer",
    title="EfficientFormer (timm)",
    classes=("timm.models.efficientformer.Attention",),
    library="timm",
    tested=">=1.0.23,<1.1",
    models="EfficientFormer",
    reason=(
        "its bias is a small table, 49 x 49 numbers a head at 224 pixels, that the whole batch "
        "shares: next to nothing is gained, EfficientFormer L3 takes 13.7 ms a call instead of "
        "13.9, and 12.6 instead of 13.0 as a CUDA graph (H200, bf16)"
    ),
    impossible=False,
)
