"""LeViT of transformers: too short to gain anything."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="transformers_levit",
    title="LeViT (transformers)",
    classes=(
        "transformers.models.levit.modeling_levit.LevitAttention",
        "transformers.models.levit.modeling_levit.LevitAttentionSubsample",
    ),
    library="transformers",
    tested=">=5.16,<5.25",
    models="LeViT",
    reason=(
        "its bias is a small table, 196 x 196 numbers a head at 224 pixels, that the whole batch "
        "shares: there is nothing to save"
    ),
    impossible=False,
)
