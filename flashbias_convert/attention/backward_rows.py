"""Gradients of what belongs to queries and of what belongs to keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from .triton_backward import QueryGradients

#: Tensors whose gradients are sums over keys, and over queries.
OF_QUERIES = (
    "phi_q", "key_bias_rows", "alibi_rows", "table_rows", "region_rows", "dense_rows",
    "lookup_rows", "diagonal", "rel_h", "rel_w",
)  # fmt: skip
OF_KEYS = ("phi_k", "key_bias")
#: Rows of an image, and columns, whose gradients one walk over the keys holds in registers; axial
#: terms of larger images take more walks. `tuning.backward_settings` goes by it.
COORDINATES = 128


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
    buffers = {
        name: shares.buffer(call.heads, n, *_columns(call, name), like=call.tensors["q"])
        for name in wanted
    }
    everything = QueryGradients(dq=shares.walks.get("dq"), **buffers)
    constants = {**kernel_constants(call, settings), "COSINE": call.cosine}
    for first, out, sizes in _walks(everything):
        run_kernel(
            query_gradients_kernel, programs * shares.slots,
            (*kernel_arguments(call, shares, out), first), {**sizes, **constants}, settings,
            layout=call.layout, numbers=numbers_of(call, shares, out, first),
        )  # fmt: skip
    return {name: shares.total(buffers[name], _shape(call, name)) for name in wanted}


def _walks(everything: QueryGradients) -> Iterator[tuple[int, QueryGradients, dict[str, int]]]:
    """The walks over the keys that write what is wanted.

    Yields:
        The first coordinate of axial terms that a walk looks at, what it writes, and sizes that the
        kernel is compiled for. All but gradients of further coordinates is written by the first.
    """
    out, width = everything, COORDINATES
    high, wide = (1 if rel is None else rel.shape[-1] for rel in (out.rel_h, out.rel_w))
    for first in range(0, max(high, wide), width):
        if first:
            out = type(out)(
                rel_h=out.rel_h if first < high else None,
                rel_w=out.rel_w if first < wide else None,
            )
        blocks = [padded(max(min(size - first, width), 1)) for size in (high, wide)]
        yield first, out, {"KH": high, "KW": wide, "BLOCK_KH": blocks[0], "BLOCK_KW": blocks[1]}


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
