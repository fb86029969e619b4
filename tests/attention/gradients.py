"""Gradients of every input of an attention call, and what they are measured against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashbias_convert import LowRank, ScoreBias
from flashbias_convert.attention import flashbias_attention
from flashbias_convert.terms import Term

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


class Recomputed(torch.autograd.Function):
    """Attention whose backward pass computes the scores again, as linear memory demands.

    The textbook form (Dao, 2023, algorithm 2) in torch: scores and sums are fp32, outputs and
    factors of products are rounded to the dtype of q. Nothing of it is tiled. The bias of the
    backward pass is `again`, since sums that are made again come out in another order.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, bias: Any, again: Any, visible: Any, scale: Any
    ) -> Tensor:
        scores = (q.float() @ k.float().mT) * scale + bias
        scores = scores.masked_fill(~visible, float("-inf"))
        lse = scores.logsumexp(-1)
        out = (torch.exp(scores - lse[..., None]).nan_to_num(0.0).to(q.dtype) @ v).to(q.dtype)
        ctx.save_for_backward(q, k, v, again, visible, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, bias, visible, out, lse = ctx.saved_tensors
        scale, dtype = ctx.scale, q.dtype
        delta = (out.float() * dout.float()).sum(-1)
        across = k.float() @ q.float().mT
        scores = across * (scale.mT if isinstance(scale, Tensor) else scale) + bias.mT
        p = torch.exp(scores.masked_fill(~visible.mT, float("-inf")) - lse[..., None, :])
        p = p.nan_to_num(0.0)
        ds = p * (v.float() @ dout.float().mT - delta[..., None, :])
        short = ds.to(dtype).float()
        dq, dk = (short.mT @ k.float()) * scale, (short @ q.float()) * scale
        dscale = None
        if isinstance(scale, Tensor):
            dscale = (ds * across).mT.sum((-1, -2), keepdim=True)
            dscale = dscale.sum_to_size(scale.shape)
        dv = p.to(dtype).float() @ dout.float()
        dbias = ds.mT.sum_to_size(bias.shape)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dbias, None, None, dscale


def recomputed(x: Inputs) -> Attention:
    """Plain attention around `Recomputed`; options as for `plain_of`."""

    def attention(q: Any, k: Any, v: Any, own: Any, options: Mapping[str, Any]) -> Tensor:
        groups = q.shape[-3] // k.shape[-3]
        k, v = (t.repeat_interleave(groups, -3) for t in (k, v))
        scale = options.get("scale")
        if options.get("cosine"):
            q, k = (torch.nn.functional.normalize(t.float(), dim=-1).to(t.dtype) for t in (q, k))
        elif scale is None:
            scale = q.shape[-1] ** -0.5
        scale = scale[:, None, None] if isinstance(scale, Tensor) else scale
        bias = torch.zeros(x.heads, x.n, x.m, device=x.device)
        again = bias = bias if own is None else own.dense(x.n, x.m)
        if own is not None:
            again = turned(own).dense(x.n, x.m).detach()
        visible = torch.ones(x.n, x.m, dtype=torch.bool, device=x.device)
        visible = visible.tril(x.m - x.n) if options.get("causal") else visible
        if options.get("key_mask") is not None:
            visible = visible & options["key_mask"][..., None, None, :]
        return Recomputed.apply(q, k, v, bias, again, visible, scale)

    return attention


def turned(bias: ScoreBias) -> ScoreBias:
    """The same bias with the columns of factors in the opposite order."""

    def turn(term: Term) -> Term:
        if not isinstance(term, LowRank):
            return term
        phi_q, phi_k = term.masked_phi_q().flip(-1), term.phi_k.flip(-1)
        return dataclasses.replace(term, phi_q=phi_q, phi_k=phi_k, ranks=None)

    return dataclasses.replace(bias, terms=tuple(turn(term) for term in bias.terms))


def plain_gradients(
    x: Inputs, bias: ScoreBias | None, truth: Gradients, **options: Any
) -> Gradients:
    """Gradients of plain attention in the dtype of the inputs, the worst of nine; see `plain_of`.

    The bias is a dense matrix that torch differentiates back to the terms. How much one result is
    off is a matter of luck, above all of how its products were summed; so keys and features come
    in four orders. Every other result is of `Recomputed`: what linear memory costs in precision,
    whoever computes it.
    """

    def plain(keys: Tensor, fused: bool) -> Attention:
        def attention(q: Any, k: Any, v: Any, own: Any, options: Mapping[str, Any]) -> Tensor:
            inputs = Inputs(x.device, x.dtype, heads=x.heads, n=x.n, m=x.m)
            inputs.q, inputs.k, inputs.v = q, k, v
            return _plain(inputs, own, keys, fused, **options)

        return attention

    generator = torch.Generator().manual_seed(11)
    sizes = (x.m, x.q.shape[-1], x.v.shape[-1])
    orders = [
        [torch.arange(size) for size in sizes],
        [torch.arange(size).flip(0) for size in sizes],
    ]
    orders += [[torch.randperm(size, generator=generator) for size in sizes] for _ in range(2)]
    each = [gradients(x, bias, plain(orders[0][0].to(x.device), True), **options)]
    for keys, *features in orders:
        for attention in (plain(keys.to(x.device), False), recomputed(x)):
            each.append(gradients(x, bias, reordered(attention, *features), **options))

    def error(name: str, found: Gradients) -> float:
        return float((found[name].double() - truth[name]).abs().nan_to_num(0).max())

    return {name: max(each, key=lambda g: error(name, g))[name] for name in truth}


def reordered(attention: Attention, features: Tensor, of_values: Tensor) -> Attention:
    """The same attention with the features of q and k, and those of v, in another order."""

    def call(q: Any, k: Any, v: Any, own: Any, options: Mapping[str, Any]) -> Tensor:
        out = attention(q[..., features], k[..., features], v[..., of_values], own, options)
        return out[..., of_values.argsort()]

    return call
