"""Gradients of what belongs to queries and of what belongs to keys."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from .backward_kernel import run_kernel
from .backward_launch import (
    GroupCall,
    fitting,
    kernel_arguments,
    kernel_constants,
    numbers_of,
    share,
    walk_constants,
)
from .strides import TAILS, padded

#: Tensors whose gradients are sums over keys, and over queries.
OF_QUERIES = (
    "phi_q", "key_bias_rows", "alibi_rows", "table_rows", "region_rows", "dense_rows",
    "lookup_rows", "diagonal", "rel_h", "rel_w",
)  # fmt: skip
OF_KEYS = ("phi_k", "key_bias")


@fitting("queries")
def query_gradients(call: GroupCall, asked: Collection[str]) -> dict[str, Tensor]:
    """Write dq, if it is there; return fp32 gradients of those tensors of queries `asked` for."""
    from .triton_backward import QueryGradients, query_gradients_kernel

    wanted = [name for name in (*OF_QUERIES, "scale") if name in asked]
    if not wanted and "dq" not in call.tensors:
        return {}
    n, *_ = call.sizes()
    settings = call.settings("queries", asked)
    programs = -(-n // settings.block_m) * call.heads
    shares = share(call, programs, [x for x in wanted if x != "scale"], not wanted)
    columns = {name: _columns(call, name) for name in wanted}
    buffers = {
        name: shares.buffer(call.heads, n, *columns[name], like=call.tensors["q"])
        for name in wanted
    }
    high, wide = (columns.get(name, (1,))[0] for name in ("rel_h", "rel_w"))
    out = QueryGradients(dq=shares.walks.get("dq"), **buffers)
    sizes = {"KH": high, "KW": wide, "BLOCK_KH": padded(high), "BLOCK_KW": padded(wide)}
    run_kernel(
        query_gradients_kernel, programs * shares.slots, kernel_arguments(call, shares, out),
        {**sizes, **kernel_constants(call, settings), "COSINE": call.cosine}, settings,
        layout=call.layout, numbers=numbers_of(call, shares, out),
    )  # fmt: skip
    return {name: shares.total(buffers[name], _shape(call, name)) for name in wanted}


@fitting("keys")
def key_gradients(call: GroupCall, asked: Collection[str]) -> dict[str, Tensor]:
    """Write dk and dv, if they are there; return fp32 gradients of tensors of keys `asked` for."""
    from .triton_keys import KeyGradients, key_gradients_kernel

    wanted = [name for name in OF_KEYS if name in asked]
    if not wanted and not {"dk", "dv"} & set(call.tensors):
        return {}
    _, m, _, _ = call.sizes()
    settings = call.settings("keys", asked)
    programs = -(-m // settings.block_n) * call.heads
    shares = share(call, programs, wanted, not wanted)
    buffers = {
        name: shares.buffer(call.heads, m, *_columns(call, name), like=call.tensors["q"])
        for name in wanted
    }
    out = KeyGradients(dk=shares.walks.get("dk"), dv=shares.walks.get("dv"), **buffers)
    run_kernel(
        key_gradients_kernel, programs * shares.slots, kernel_arguments(call, shares, out),
        walk_constants(call, settings), settings,
        layout=call.layout, numbers=numbers_of(call, shares, out),
    )  # fmt: skip
    return {name: shares.total(buffers[name], _shape(call, name)) for name in wanted}


def _columns(call: GroupCall, name: str) -> tuple[int, ...]:
    """Sizes that follow the rows of a gradient."""
    return tuple(call.tensors[name].shape[-1:]) if TAILS.get(name) == 3 else ()


def _shape(call: GroupCall, name: str) -> tuple[int, ...]:
    """The shape of a gradient."""
    return (call.heads, 1) if name == "scale" else tuple(call.tensors[name].shape)
