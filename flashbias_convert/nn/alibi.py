"""Linear biases by distance."""

from __future__ import annotations

from torch import Tensor, nn

from ..decompose.closed_forms import SlopeConvention, alibi_slopes
from ..terms import Alibi, ScoreBias
from .base import LearnableBias


class AlibiBias(LearnableBias):
    """Linear biases, for any length: adds ``slopes[h] * (j - i)``, or ``-slopes[h] * |j - i|``.

    Source: Press et al., 2022; FlashBias, Example 3.4.

    Args:
        heads: number of query heads, H.
        learnable: the slopes are a parameter; else a buffer that is saved with the model.
        symmetric: by the absolute distance, for encoders; with ``causal=True`` it makes no
            difference.
        convention: of slopes for numbers of heads that are no powers of two, see `alibi_slopes`.

    Raises:
        UsageError: `heads` is not positive, or an unknown convention.
    """

    slopes: Tensor

    def __init__(
        self,
        heads: int,
        *,
        learnable: bool = False,
        symmetric: bool = False,
        convention: SlopeConvention = "bloom",
    ) -> None:
        super().__init__(heads)
        self.symmetric, self.convention = symmetric, convention
        slopes = alibi_slopes(heads, convention)
        if learnable:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes)

    def forward(self, pos_q: Tensor | None = None, pos_k: Tensor | None = None) -> ScoreBias:
        """Terms for any number of queries and keys.

        Args:
            pos_q: integers, shape (*batch, N); default by the `query_start` of the call.
            pos_k: integers, shape (*batch, M); default 0, 1, ...
        """
        term = Alibi(slopes=self.slopes, pos_q=pos_q, pos_k=pos_k, symmetric=self.symmetric)
        return ScoreBias((term,), self.heads)

    def extra_repr(self) -> str:
        learnable = isinstance(self.slopes, nn.Parameter)
        return f"heads={self.heads}, learnable={learnable}, symmetric={self.symmetric}"
