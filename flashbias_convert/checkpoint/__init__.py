"""Checkpoints: from bytes to a model and back."""

from .architecture import Architecture, architecture_of
from .build import build_model
from .convert import Conversion, convert_checkpoint
from .identify import identify
from .load import load_model
from .open import OpenedModel, open_model
from .plans import read_plan
from .read import Checkpoint, read_checkpoint
from .restore import Restored, restore_checkpoint
from .save import save_model

__all__ = [
    "Architecture",
    "Checkpoint",
    "Conversion",
    "OpenedModel",
    "Restored",
    "architecture_of",
    "build_model",
    "convert_checkpoint",
    "identify",
    "load_model",
    "open_model",
    "read_checkpoint",
    "read_plan",
    "restore_checkpoint",
    "save_model",
]
