"""Attention with a score bias: q, k, v and terms -> output."""

from .bounds import SLACK, bias_bound
from .operator import flashbias_attention
from .prepared import PreparedBias

__all__ = ["SLACK", "PreparedBias", "bias_bound", "flashbias_attention"]
