"""Biases of a state dict that nobody can build a model from: found by names and shapes."""

from .model import BareAttention, bare_model
from .sizes import Sizes, parse_window

__all__ = ["BareAttention", "Sizes", "bare_model", "parse_window"]
