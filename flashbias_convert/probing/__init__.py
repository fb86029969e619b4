"""Find out what a model adds to its attention scores, without a recipe."""

from .probe import probe_model
from .recipe_file import recipe_text
from .report import FREE, MEANING, Kind, Probe, SiteProbe

__all__ = ["FREE", "MEANING", "Kind", "Probe", "SiteProbe", "probe_model", "recipe_text"]
