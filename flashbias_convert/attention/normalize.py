"""Launches the Triton kernel that normalises the rows of keys, for cosine attention."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from .launch_plan import MAX_PLANS, LaunchPlan, layout_of
from .strides import MAX_BATCH_DIMS, batch_strides, collapse_batch, own_strides, padded

_PLANS: dict[Hashable, LaunchPlan | None] = {}
_UNKNOWN: Any = object()


def normalize_rows(x: Tensor) -> Tensor:
    """Rows of x (*batch, H, M, D) scaled to unit length; zero rows stay zero.

    Half-precision rows come back as fp16: numbers up to one need no other exponent, and its
    rounding is eight times finer than that of bf16.
    """
    dtype = x.dtype if x.dtype == torch.float32 else torch.float16
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return out
    key = (x.device, layout_of((x,)))
    plan = _PLANS.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = _make_plan(x)
    if plan is None:
        return torch.stack([normalize_rows(entry) for entry in x])
    plan.run(x.device, (x, out))
    return out


def _make_plan(x: Tensor) -> LaunchPlan | None:
    """Arguments and grid; None where the kernel cannot tell the batch dimensions apart."""
    from .triton_normalize import normalize_rows_kernel

    *batch, heads, m, d = x.shape
    sizes, (strides,) = collapse_batch(batch, [batch_strides("k", x, batch)])
    if len(sizes) > MAX_BATCH_DIMS:
        return None
    lead = [1] * (MAX_BATCH_DIMS - len(sizes))
    sizes = lead + sizes
    rows = max(16, 2048 // padded(d))
    arguments = {
        "x_ptr": None,
        "out_ptr": None,
        "x_strides": (*[0] * len(lead), *strides, *own_strides("k", x)),
        "batch_1": sizes[1],
        "batch_2": sizes[2],
        "H": heads,
        "M": m,
        "D": d,
        "BLOCK_D": padded(d),
        "ROWS": rows,
    }
    return LaunchPlan(
        normalize_rows_kernel,
        {name: arguments[name] for name in normalize_rows_kernel.arg_names},
        ("x_ptr", "out_ptr"),
        grid=-(-m // rows) * heads * sizes[0] * sizes[1] * sizes[2],
        options={},
    )
