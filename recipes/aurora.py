"""Aurora of Microsoft, whose windows have a mask and no bias."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="aurora",
    title="Aurora",
    classes=("aurora.model.swin3d.WindowAttention",),
    library="aurora",
    tested=">=1.0,<3",
    models="Aurora of Microsoft",
    reason=(
        "it has no relative positions, so there is no bias to convert, and nothing was measured: "
        "windows of 144 tokens of a Swin for the atmosphere, which have the mask of shifted ones "
        "alone, on torch's fused attention already"
    ),
    impossible=False,
    with_what="a stand-in for its class",
)
