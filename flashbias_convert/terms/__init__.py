"""The algebra of score biases: a bias is a sum of terms.

Letters used everywhere: B batch, H heads, N queries, M keys, D head size, Dv value size, R rank,
W windows. Layouts are (*batch, H, N, D) for q and (*batch, H, N, M) for a dense bias; leading
dimensions broadcast, right-aligned.
"""

from .alibi import Alibi
from .axial import Axial
from .base import Term
from .dense import Dense
from .diagonal import Diagonal
from .key_bias import KeyBias
from .lookup import Lookup
from .low_rank import LowRank
from .regions import Regions
from .relative_table import RelativeTable
from .score_bias import TERM_KINDS, ScoreBias

__all__ = [
    "TERM_KINDS",
    "Alibi",
    "Axial",
    "Dense",
    "Diagonal",
    "KeyBias",
    "Lookup",
    "LowRank",
    "Regions",
    "RelativeTable",
    "ScoreBias",
    "Term",
]
