"""CPM-Ant: distances inside a segment, and another number for each pair of segments."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="transformers_cpmant",
    title="CPM-Ant (transformers)",
    classes=("transformers.models.cpmant.modeling_cpmant.CpmAntAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    models="CPM-Ant",
    reason=(
        "its bias depends on the segments of each batch (distances inside one, a number for "
        "each pair of them), and its mask is neither causal nor one of padding"
    ),
)
