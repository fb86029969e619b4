"""The configuration of GPT-2 with ALiBi."""

from __future__ import annotations

from typing import Any, get_args

from transformers import GPT2Config

from ..decompose.closed_forms import SlopeConvention
from ..errors import UsageError


class AlibiGPT2Config(GPT2Config):
    """GPT-2's configuration, and which slopes its heads have.

    `n_positions` tells the length that a model was trained with and limits nothing. Scores are
    softmaxed in float32 or wider whatever `reorder_and_upcast_attn` says.

    Args:
        alibi_slopes: "bloom", "mpt" or "geometric", see `alibi_slopes` in
            `flashbias_convert.decompose.closed_forms`.
        alibi_bias_max: minus the exponent of the last slope.
        **kwargs: of `GPT2Config`.

    Raises:
        UsageError: an unknown convention, a maximum that is not positive, cross-attention, or
            channels that the heads cannot share.
    """

    model_type = "alibi_gpt2"

    def __init__(
        self,
        alibi_slopes: SlopeConvention = "bloom",
        alibi_bias_max: float = 8.0,
        **kwargs: Any,
    ) -> None:
        self.alibi_slopes = alibi_slopes
        self.alibi_bias_max = alibi_bias_max
        kwargs.pop("model_type", None)  # a GPT-2's, when its checkpoint becomes one of this type
        super().__init__(**kwargs)
        if alibi_slopes not in get_args(SlopeConvention):
            raise UsageError(
                f"alibi_slopes must be one of {', '.join(get_args(SlopeConvention))}, "
                f"got {alibi_slopes!r}"
            )
        if not alibi_bias_max > 0:
            raise UsageError(f"alibi_bias_max must be positive, got {alibi_bias_max}")
        if getattr(self, "add_cross_attention", False):
            raise UsageError("this model has no cross-attention", "set add_cross_attention=False")
        if self.n_embd % self.n_head:
            raise UsageError(f"{self.n_embd} channels cannot be shared by {self.n_head} heads")
