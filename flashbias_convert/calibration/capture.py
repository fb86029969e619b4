"""The attention calls of a model on real inputs, a few entries of the batch each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..inputs import Batch
from ..modules import ScoreBiasModule

#: entries of the batch (windows, sequences) that are kept of a call
KEPT_ENTRIES = 32


@dataclass(frozen=True, eq=False)
class Call:
    """Inputs of one attention call.

    Attributes:
        q, k, v: shapes (*batch, H, N, D) and so on, float32.
        options: keyword arguments of `ScoreBiasModule.forward`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def capture_calls(
    model: nn.Module, sites: Iterable[str], batches: Iterable[Batch]
) -> dict[str, list[Call]]:
    """Run a patched model and keep what reaches its attention.

    Args:
        model: patched, in evaluation mode.
        sites: names of patched modules.
        batches: calls of the model.

    Returns:
        By site, one call for each time that it ran.
    """
    found: dict[str, list[Call]] = {name: [] for name in sites}
    wrapped: list[ScoreBiasModule] = []
    try:
        for name, calls in found.items():
            terms: Any = model.get_submodule(name).score_bias
            terms.forward = _recorder(terms.forward, calls)
            wrapped.append(terms)
        for batch in batches:
            model(*batch.args, **batch.kwargs)
    finally:
        for terms in wrapped:
            del terms.forward  # the attribute of the instance; the class has its own
    return found


def _recorder(forward: Any, calls: list[Call]) -> Any:
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        calls.append(_shortened(q, k, v, options))
        return forward(q, k, v, **options)

    return call


def _shortened(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Call:
    """The first entries of the outermost batch dimension; the inner ones go with masks."""
    size = q.shape[0]
    keep = min(size, max(1, KEPT_ENTRIES // math.prod(q.shape[1:-3])))
    kept = {
        name: value[:keep] if name == "key_mask" and value is not None else value
        for name, value in options.items()
    }
    q, k, v = (x[:keep].detach().float() for x in (q, k, v))
    return Call(q, k, v, kept)
