"""Learnable score biases for models of your own: modules whose forward gives a `ScoreBias`.

    bias = LowRankBias(heads=8, n=256, m=256, rank=16)
    out = flashbias_attention(q, k, v, bias())

Nothing of size N x M is made, and gradients reach the parameters at memory linear in N and M.
Parameters are fp32 and stay so when a model is cast to half precision, like all factors: kernels
round them themselves, where it does not show.
"""

from .alibi import AlibiBias
from .base import LearnableBias
from .low_rank import LowRankBias
from .relative_table import RelativeTableBias
from .spatial_distance import SpatialDistanceBias, distance_factors

__all__ = [
    "AlibiBias",
    "LearnableBias",
    "LowRankBias",
    "RelativeTableBias",
    "SpatialDistanceBias",
    "distance_factors",
]
