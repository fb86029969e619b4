"""The algebra of score biases: a bias is a sum of terms.

Letters used everywhere: B batch, H heads, N queries, M keys, D head size, Dv value size, R rank,
W windows. Layouts are (*batch, H, N, D) for q and (*batch, H, N, M) for a dense bias; leading
dimensions broadcast, right-aligned.
"""

from .alibi import Alibi
from .base import Term
from .dense import Dense
from .key_bias import KeyBias
from .low_rank import LowRank
from .regions import Regions
from .relative_table import RelativeTable
from .score_bias import TERM_KINDS, ScoreBias

__all__ = [
    "TERM_KINDS",
    "Alibi",
    "Dense",
    "KeyBias",
    "LowRank",
    "Regions",
    "RelativeTable",
    "ScoreBias",
    "Term",
]
