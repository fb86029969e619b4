"""Terms that all layers of a call have in common, made and packed by the first of them.

In a step of a decoder a layer otherwise spends more time on its term than on attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .attention import PreparedBias
from .builders import Builder
from .kept import kept_with
from .terms import ScoreBias
from .tracing import is_traced


def common_bias(
    name: str, builder: Builder, inputs: Mapping[str, Any], heads: int
) -> PreparedBias | None:
    """What a builder makes of a tensor that layers share, kept with that tensor.

    Args:
        name: of the builder.
        builder: what makes the term.
        inputs: of a call.
        heads: of the attention that adds the term and nothing else.

    Returns:
        The bias; None where the layers share no tensor, or have one each besides, where gradients
        flow to it, and in code that is compiled or traced.
    """
    common, rest = builder.common, dict(inputs)
    if common is None or is_traced():
        return None
    shared: Tensor = rest.pop(common)
    asks = torch.is_grad_enabled() and shared.requires_grad
    if asks or any(isinstance(value, Tensor) for value in rest.values()):
        return None

    def make() -> PreparedBias:
        # the tensor keeps what is made, which must not keep it
        rest[common] = shared.detach().clone()
        term = builder.make(**rest)
        return PreparedBias.of_calls(ScoreBias((term,), heads))

    made: PreparedBias = kept_with(shared, (name, heads, *rest.items()), make)
    return made
