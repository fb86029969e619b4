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
from .kept import is_kept, kept_with
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
        The bias; None where the layers share no tensor, or have another one each besides, where
        gradients flow to one, and in code that is compiled or traced.
    """
    common, rest = builder.common, dict(inputs)
    if common is None or is_traced():
        return None
    shared: Tensor = rest.pop(common)
    key = {n: numbers_of(t) if n in builder.by_value else t for n, t in rest.items()}
    own = any(key[n] is None for n in builder.by_value) or any(map(torch.is_tensor, key.values()))
    if own or (torch.is_grad_enabled() and shared.requires_grad):
        return None

    def make() -> PreparedBias:
        # the tensor keeps what is made, which must not keep it, nor follow a layer that changes
        copied = {n: inputs[n].detach().clone() for n in (common, *builder.by_value)}
        term = builder.make(**{**inputs, **copied})
        return PreparedBias.of_calls(ScoreBias((term,), heads))

    made: PreparedBias = kept_with(shared, (name, heads, *key.items()), make)
    return made


def numbers_of(tensor: Tensor) -> tuple[float, ...] | None:
    """The numbers of a small tensor, for which the device is waited for once.

    None where that cannot be: for parameters, which change without a trace, for tensors without
    memory of their own, and while a CUDA graph is recorded.
    """
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_meta:
        return None
    known = is_kept(tensor, "numbers")
    if not known and tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    found: tuple[float, ...] = kept_with(tensor, "numbers", lambda: tuple(tensor.tolist()))
    return found
