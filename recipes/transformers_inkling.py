"""Inkling: each query mixes its own bias from profiles of the distance."""

from __future__ import annotations

from flashbias_convert.refused import refused

_CLASSES = {
    "inkling": ("InklingAttention",),
    "inkling2": ("Inkling2SlidingAttention", "Inkling2FullAttention"),
    "inkling2_loop": ("Inkling2LoopSlidingAttention", "Inkling2LoopFullAttention"),
}

recipe = refused(
    name="transformers_inkling",
    title="Inkling, Inkling 2, Inkling 2 Loop (transformers)",
    classes=tuple(
        f"transformers.models.{name}.modeling_{name}.{cls}"
        for name, classes in _CLASSES.items()
        for cls in classes
    ),
    library="transformers",
    tested=">=5.16,<5.25",
    models="Inkling, Inkling 2, Inkling 2 Loop",
    reason=(
        "each query mixes its own bias from profiles of the distance: each call has another "
        "bias, which is of full rank"
    ),
)
