"""Ranks chosen by what they do to the outputs of attention on real inputs."""

from .calibrate import calibrate_model
from .search import CalibrationError

__all__ = ["CalibrationError", "calibrate_model"]
