"""Pangu-Weather: a 3-D Swin-like transformer with an earth-specific position bias."""

from .attention import EarthAttention3D, earth_position_index
from .model import PanguModel, build

__all__ = ["EarthAttention3D", "PanguModel", "build", "earth_position_index"]
