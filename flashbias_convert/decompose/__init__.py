"""From a bias to terms, and what was lost on the way.

Pure tensor maths: nothing here knows a module, a kernel or an architecture.
"""

from .choose import decompose
from .codes import check_index
from .costs import SHORT_GAIN, SHORTEST_N, added_cost, rank_bucket
from .decision import Decomposition, HeadDecision
from .energy import cumulative_energy, rank_for_energy, spectrum
from .exact import dense_term, is_row_constant, regions, relative_table
from .gain import expected_gain
from .lookups import lookup
from .loss import Loss, measure, row_center
from .svd import split_columns, svd_factors

__all__ = [
    "SHORTEST_N",
    "SHORT_GAIN",
    "Decomposition",
    "HeadDecision",
    "Loss",
    "added_cost",
    "check_index",
    "cumulative_energy",
    "decompose",
    "dense_term",
    "expected_gain",
    "is_row_constant",
    "lookup",
    "measure",
    "rank_bucket",
    "rank_for_energy",
    "regions",
    "relative_table",
    "row_center",
    "spectrum",
    "split_columns",
    "svd_factors",
]
