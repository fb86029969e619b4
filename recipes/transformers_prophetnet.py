"""ProphetNet: each query makes its own number for every bucket of the distance."""

from __future__ import annotations

from flashbias_convert.refused import refused

recipe = refused(
    name="transformers_prophetnet",
    title="ProphetNet (transformers)",
    classes=("transformers.models.prophetnet.modeling_prophetnet.ProphetNetNgramSelfAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    models="ProphetNet: self-attention of its decoder; its other attention has no positions",
    reason=(
        "each query makes its own numbers for the buckets of the distance, by a layer on its "
        "token: each call has another bias, which is of full rank or nearly so"
    ),
)
