"""Whether a call is computed, or written down for later."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace writes down what this call does.

    Then nothing that the call makes may be kept for the next one: torch.jit.trace, for one, traces
    a model twice and refuses it if the second graph is another one.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
