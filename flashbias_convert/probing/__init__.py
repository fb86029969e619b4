"""Find out what a model adds to its attention scores, without a recipe."""

from .probe import probe_model
from .report import MEANING, Kind, Probe, SiteProbe

__all__ = ["MEANING", "Kind", "Probe", "SiteProbe", "probe_model"]
