"""Gradients of what belongs to pairs of a query and a key: matrices and tables."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .backward_kernel import run_kernel
from .backward_launch import (
    GroupCall,
    Shares,
    fitting,
    kernel_arguments,
    kernel_constants,
    numbers_of,
    share,
    sum_to,
)
from .tuning import LaunchSettings

#: Tensors of pairs, and the gate of each.
PAIRS = {"dense": "dense_rows", "table": "table_rows", "lookup": "lookup_rows"}
#: Most numbers of a buffer for some rows of score gradients, if one block of rows fits.
STRIP = 2**25
#: Values with one code that a program of `sums_by_code_kernel` adds up, about.
LONG_SUM = 4096


@fitting("pairs")
def pair_gradients(call: GroupCall, wanted: Collection[str]) -> dict[str, Tensor]:
    """Gradients, fp32, of those of dense, table and lookup that are wanted."""
    found = {}
    for name in PAIRS:
        if name in wanted:
            found[name] = _gradient(call, name, call.settings("pairs", wanted))
    return found


def _gradient(call: GroupCall, name: str, settings: LaunchSettings) -> Tensor:
    n, m, _, _ = call.sizes()
    target = call.tensors[name]
    tiles = -(-n // settings.block_m) * -(-m // settings.block_n) * call.heads
    own = [name, "lookup_code"] if name == "lookup" else [name]
    shares = share(call, tiles, own, False)
    height = max(STRIP // max(shares.slots * call.heads * m, 1), 1)
    height = min(-(-height // settings.block_m) * settings.block_m, n)
    total = torch.zeros(target.shape, dtype=torch.float32, device=target.device)
    for first in range(0, n, height):
        rows = min(height, n - first)
        strip = _strip(call, name, settings, shares, first, rows)
        if name == "dense":
            shape = (*target.shape[:-2], rows, m)
            total[..., first : first + rows, :] = shares.total(strip, shape)
        else:
            codes = _codes(call, name, shares, first, rows)
            values = strip.unflatten(0, (shares.splits, -1))
            values = values[0] if shares.splits == 1 else values.sum(0)
            sums = sums_by_code(values.flatten(-2), codes, target.shape[-1])
            total += sum_to(sums.unflatten(0, shares.lead or (1,)), target.shape)
    return total


def _strip(
    call: GroupCall, name: str, settings: LaunchSettings, shares: Shares, first: int, rows: int
) -> Tensor:
    """Gradients of the scores of some rows, (slots, G, rows, M)."""
    from .triton_pairs import pair_gradients_kernel

    _, m, _, _ = call.sizes()
    out = shares.buffer(call.heads, rows, m, like=call.tensors["q"])
    programs = -(-rows // settings.block_m) * -(-m // settings.block_n) * call.heads
    c, t, _, *rest = kernel_arguments(call, shares, None)
    run_kernel(
        pair_gradients_kernel, programs * shares.slots,
        (c, t, out, shares.walks.get(PAIRS[name]), *rest, first, rows),
        kernel_constants(call, settings), settings,
        layout=call.layout, numbers=(name, *numbers_of(call, shares, None, first, rows)),
    )  # fmt: skip
    return out


def _codes(call: GroupCall, name: str, shares: Shares, first: int, rows: int) -> Tensor:
    """The code of each pair of some rows, (kept entries or 1, rows * M)."""
    if name == "table":
        own = call.tensors["codes_q"][first : first + rows, None] + call.tensors["codes_k"]
        return own.reshape(1, -1)
    code = call.tensors["lookup_code"][..., first : first + rows, :]
    if code.shape[:-2].numel() == 1:
        return code.reshape(1, -1)
    extra = max(code.dim() - 2 - len(shares.lead), 0)
    code = code[(0,) * extra]
    return code.expand(*shares.lead, *code.shape[-2:]).reshape(-1, rows * code.shape[-1])


def sums_by_code(values: Tensor, codes: Tensor, size: int) -> Tensor:
    """Sums of what has the same code, always in the same order.

    Args:
        values: contiguous fp32, shape (K, G, E).
        codes: int32, shape (K or 1, E), from 0 to size - 1.
        size: number of codes.

    Returns:
        fp32, shape (K, G, size).
    """
    from .triton_pairs import sums_by_code_kernel

    k, g, e = values.shape
    ordered, order = torch.sort(codes, dim=-1, stable=True)
    bins = torch.arange(size + 1, device=codes.device, dtype=codes.dtype)
    bounds = torch.searchsorted(ordered, bins.expand(len(codes), -1).contiguous())
    splits = min(max(e // (size * LONG_SUM), 1), 64)
    out = torch.empty((splits, k, g, size), dtype=torch.float32, device=values.device)
    arguments: dict[str, Any] = {"BT": 16, "BE": 64}
    sums_by_code_kernel[(-(-size // 16) * splits * k * g,)](
        values.contiguous(), order, bounds, out, g, e, size, splits, int(len(codes) > 1),
        **arguments,
    )  # fmt: skip
    return out.sum(0)
