"""Factor networks for the sites of a model whose biases depend on the input."""

from .sites import fit_sites

__all__ = ["fit_sites"]
