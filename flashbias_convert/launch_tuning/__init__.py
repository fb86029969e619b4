"""Launch settings for the calls of a model, measured on this machine's card."""

from .candidates import candidates
from .record import Launch, recorded_launches
from .tune import Tuned, tune_launches

__all__ = ["Launch", "Tuned", "candidates", "recorded_launches", "tune_launches"]
