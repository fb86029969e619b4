"""Attention with a score bias: q, k, v and terms -> output."""

from .operator import flashbias_attention
from .prepared import PreparedBias

__all__ = ["PreparedBias", "flashbias_attention"]
