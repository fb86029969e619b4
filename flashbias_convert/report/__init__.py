"""A plan as one HTML page, to look through layers and heads."""

from .page import write_page

__all__ = ["write_page"]
