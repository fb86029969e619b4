"""Gradients of every input of an attention call, and what they are measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashbias_convert import ScoreBias
from flashbias_convert.attention import flashbias_attention

from .cases import Inputs, _plain

Gradients = dict[str, Tensor]
#: q, k, v, bias, options -> output
Attention = Callable[[Tensor, Tensor, Tensor, ScoreBias | None, Mapping[str, Any]], Tensor]


def gradients(
    x: Inputs,
    bias: ScoreBias | None,
    attention: Attention,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of q, k, v, the terms' tensors and, where it is a tensor, the scale, by name.

    Args:
        x, bias: the inputs.
        attention: what is differentiated.
        dtype: cast everything to it first; else dtypes stay.
        **options: arguments of the call.
    """
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        leaves[name] = t.detach().clone().to(t.dtype if dtype is None else dtype).requires_grad_()
        return leaves[name]

    q, k, v = (leaf(name, getattr(x, name)) for name in "qkv")
    own = None
    if bias is not None:
        terms = zip(bias.term_names(), bias.terms, strict=True)
        made = [t.map_tensors(lambda key, x, n=name: leaf(f"{n}.{key}", x)) for name, t in terms]
        own = ScoreBias(tuple(made), bias.num_heads)
    if isinstance(options.get("scale"), Tensor):
        options = {**options, "scale": leaf("scale", options["scale"])}
    out = attention(q, k, v, own, options)
    generator = torch.Generator().manual_seed(7)
    # a gradient that half precision holds exactly, so that all dtypes start from the same
    start = torch.randn(out.shape, generator=generator).half().to(out)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), start), strict=True))


def of_backend(name: str) -> Attention:
    """Our operator on one backend."""
    return lambda q, k, v, bias, options: flashbias_attention(
        q, k, v, bias, backend=name, **options
    )


def plain_gradients(
    x: Inputs, bias: ScoreBias | None, truth: Gradients, **options: Any
) -> Gradients:
    """Gradients of plain attention in the dtype of the inputs, the worst of three; see `plain_of`.

    The bias is a dense matrix that torch differentiates back to the terms.
    """

    def plain(order: Tensor, fused: bool) -> Gradients:
        def attention(q: Any, k: Any, v: Any, own: Any, options: Mapping[str, Any]) -> Tensor:
            inputs = Inputs(x.device, x.dtype, heads=x.heads, n=x.n, m=x.m)
            inputs.q, inputs.k, inputs.v = q, k, v
            return _plain(inputs, own, order, fused, **options)

        return gradients(x, bias, attention, **options)

    keys = torch.arange(x.m, device=x.device)
    each = [plain(keys, False), plain(keys.flip(0), False), plain(keys, True)]

    def error(name: str, found: Gradients) -> float:
        return float((found[name].double() - truth[name]).abs().nan_to_num(0).max())

    return {name: max(each, key=lambda g: error(name, g))[name] for name in truth}
