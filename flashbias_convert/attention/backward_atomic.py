"""Gradients of queries and of keys in one walk, with atomics; see `triton_atomic`.

Five products a tile instead of seven. What it does not serve is computed by the kernels that give
the same bits every time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from .backward_kernel import run_kernel
from .backward_launch import (
    GroupCall,
    Shares,
    aligned,
    fitting,
    kernel_arguments,
    numbers_of,
    share,
    walk_constants,
)
from .backward_rows import OF_KEYS, OF_QUERIES
from .strides import padded

#: Gradients that this walk writes by key and the host sums, by their names in `KeyGradients`.
BY_KEY = {"phi_k": "phi_k", "key_bias": "key_bias", "scale": "scale", "alibi_rows": "slopes"}


def is_served(call: GroupCall, wanted: Collection[str]) -> bool:
    """Whether one walk can do it, and saves another.

    Gradients of row scales are sums over keys for each query: the kernel of queries has them. Of
    those only a slope is served that all rows of a head share, as all keys share it, too.
    """
    rows = {"dq"} & set(call.tensors) | set(OF_QUERIES) & set(wanted)
    keys = {"dk", "dv"} & set(call.tensors) | set(OF_KEYS) & set(wanted)
    if "alibi_rows" in wanted and call.tensors["alibi_rows"].shape[-1] == 1:
        rows = rows - {"alibi_rows"}
    return bool(rows) and bool(keys) and rows <= {"dq", "phi_q"}


@fitting("all")
def all_gradients(call: GroupCall, wanted: Collection[str]) -> dict[str, Tensor]:
    """Write dq, dk and dv as far as they are there; return fp32 gradients of `wanted` but pairs."""
    from .triton_atomic import all_gradients_kernel
    from .triton_keys import KeyGradients

    n, m, d, _ = call.sizes()
    settings = call.settings("all", wanted)  # of the call as it was given
    shapes = {}
    if "phi_q" in wanted:
        shapes["phi_q_sums"] = tuple(call.tensors["phi_q"].shape)
    if "dq" in call.tensors:
        shapes["q_sums"] = (*call.batch, call.heads, n, d)
    sums = _zeros(shapes, call.tensors["q"].device)
    call = dataclasses.replace(call, tensors={**call.tensors, **sums})
    by_key = [name for name in BY_KEY if name in wanted]
    programs = -(-m // settings.block_n) * call.heads
    shares = share(call, programs, [x for x in by_key if x != "scale"], not by_key)
    buffers = {name: _buffer(call, name, shares) for name in by_key}
    walks = {n: shares.walks[n] for n in ("dk", "dv", *sums) if n in shares.walks}
    out = KeyGradients(**walks, **{BY_KEY[name]: buffers[name] for name in by_key})
    whole = {"ALIGNED_SUMS": "q_sums" in sums and aligned(sums["q_sums"])}
    run_kernel(
        all_gradients_kernel, programs * shares.slots, kernel_arguments(call, shares, out),
        {**walk_constants(call, settings), **whole}, settings,
        layout=call.layout, numbers=numbers_of(call, shares, out),
    )  # fmt: skip
    if "q_sums" in sums:
        _finish_queries(call)
    found = {} if "phi_q" not in wanted else {"phi_q": sums["phi_q_sums"]}
    for name in by_key:
        own = (call.heads, 1) if name == "scale" else tuple(call.tensors[name].shape)
        found[name] = shares.total(buffers[name], own)
    return found


def _zeros(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """fp32 zeros by name, in one piece of memory that one launch fills.

    What comes first must fill whole vectors, as factors do.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = torch.zeros(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    return {name: t.view(shape) for (name, shape), t in zip(shapes.items(), parts, strict=True)}


def _buffer(call: GroupCall, name: str, shares: Shares) -> Tensor:
    like = call.tensors["q"]
    tail = (call.tensors["phi_k"].shape[-1],) if name == "phi_k" else ()
    return shares.buffer(call.heads, call.sizes()[1], *tail, like=like)


def _finish_queries(call: GroupCall) -> None:
    """dq from its sums: scaled, through the length of rows with cosine attention, rounded."""
    from .triton_atomic import finish_queries_kernel
    from .triton_tiles import Call

    n, _, d, _ = call.sizes()
    shares = share(call, 1, (), True)
    rows = max(16, 2048 // padded(d))
    walks = shares.walks
    run_kernel(
        finish_queries_kernel, -(-n // rows) * call.heads * shares.entries.kept,
        (shares.bundle(Call), walks.get("heads"), walks["q_sums"], walks["dq"], shares.entries,
         call.scale, call.heads, n),
        {"D": d, "BLOCK_D": padded(d), "ROWS": rows, "COSINE": call.cosine},
        layout=call.layout, numbers=tuple(shares.entries),
    )  # fmt: skip
