"""DeBERTa: scores of positions with the content of queries and keys."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="transformers_deberta",
    title="DeBERTa (transformers)",
    classes=(
        "transformers.models.deberta.modeling_deberta.DisentangledSelfAttention",
        "transformers.models.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention",
        "transformers.models.sew_d.modeling_sew_d.DisentangledSelfAttention",
    ),
    library="transformers",
    tested=">=5.16,<5.25",
    models="DeBERTa, DeBERTa V2 and V3, SEW-D",
    reason=(
        "it adds products of queries and of keys with an embedding of their distance: "
        "each call has another bias, which is of full rank"
    ),
)
