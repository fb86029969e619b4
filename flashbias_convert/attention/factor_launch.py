"""Launches the kernels of `triton_columns`, with all that depends on shapes worked out once."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .launch_plan import MAX_PLANS, LaunchPlan, layout_of
from .strides import MAX_BATCH_DIMS, batch_strides, collapse_batch, own_strides, padded

T = TypeVar("T")
Shape = tuple[int, ...]
ColumnsPlan = tuple[LaunchPlan, tuple[Shape, torch.dtype], tuple[Shape, torch.dtype]]
GradientsPlan = tuple[LaunchPlan, dict[str, Shape]]

#: Numbers that one program writes, about.
TILE = 2048

#: by what a call looks like; None: more batch dimensions than the kernels walk
_PLANS: dict[Hashable, Any] = {}
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def is_served(*tensors: Tensor) -> bool:
    """Whether the kernels write the columns: on a card, for tensors that are real."""
    if torch.compiler.is_compiling():
        return False
    recorded = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    # a mode that watches torch's operations, to trace them for instance, would miss a launch
    if recorded or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all([_is_readable(t) for t in tensors])


def _is_readable(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return False
    if tensor.is_cuda:
        return tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    # Triton's interpreter takes bf16 for raw bits
    return _INTERPRETED and tensor.dtype in (torch.float32, torch.float16)


def reciprocal(number: float) -> float:
    """1 / `number` as fp32 has it: what torch multiplies by to divide by a number on a card."""
    return ctypes.c_float(1.0 / ctypes.c_float(number).value).value


def _kept(key: Hashable, make: Callable[[], T | None]) -> T | None:
    if key not in _PLANS:
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = make()
    made: T | None = _PLANS[key]
    return made


def columns_plan(phi_q: Tensor, phi_k: Tensor, *kind: Any) -> ColumnsPlan | None:
    """How to launch `factor_columns_kernel`, and shapes and dtypes of what it writes.

    Args:
        phi_q, phi_k: see `factor_columns`.
        kind: COLUMNS, split, dtype, whether phi_q stays undivided, whether it is divided by one
            number for all heads, whether columns are balanced already.

    Returns:
        None where the kernel cannot tell the batch dimensions apart.
    """
    key = (phi_q.device, *kind, *layout_of((phi_q, phi_k)))
    return _kept(key, lambda: _columns_plan(phi_q, phi_k, *kind))


def gradients_plan(
    phi_q: Tensor, phi_k: Tensor, split: int, found: Mapping[str, Tensor]
) -> GradientsPlan | None:
    """How to launch `factor_gradients_kernel`, and shapes of what it writes; else as above."""
    key = (phi_q.device, split, *found, *layout_of((phi_q, phi_k, *found.values())))
    return _kept(key, lambda: _gradients_plan(phi_q, phi_k, split, found))


def _columns_plan(
    phi_q: Tensor,
    phi_k: Tensor,
    columns: int,
    split: int,
    dtype: torch.dtype,
    undivided: bool,
    one_size: bool,
    balanced: bool,
) -> ColumnsPlan | None:
    from .triton_columns import factor_columns_kernel as kernel

    rank = phi_q.shape[-1]
    rows = max(1, TILE // columns)
    walks = _walks((phi_q, phi_k), (phi_q, phi_k), rows)
    if walks is None:
        return None
    (walk_q, programs_q), (walk_k, programs_k) = walks
    arguments = {
        "walk_q": walk_q,
        "walk_k": walk_k,
        "programs_q": programs_q,
        "R": rank,
        "split": split,
        "COLUMNS": columns,
        "LOW_Q": -1 if undivided else 2,
        "INVERSE": phi_q.is_cuda,
        "ROWS": rows,
    }
    optional = ([] if balanced else ["top_q", "top_k"]) + ([] if one_size else ["sizes"])
    tensors = ["phi_q", "phi_k", *optional, "q_out", "k_out"]
    plan = _plan(kernel, arguments, tensors, ["size"], programs_q + programs_k)
    dtype_q = torch.float32 if undivided else dtype
    return plan, ((*phi_q.shape[:-1], columns), dtype_q), ((*phi_k.shape[:-1], columns), dtype)


def _gradients_plan(
    phi_q: Tensor, phi_k: Tensor, split: int, found: Mapping[str, Tensor]
) -> GradientsPlan | None:
    from .triton_columns import factor_gradients_kernel as kernel

    rank = phi_q.shape[-1]
    width = padded(rank)
    rows = max(1, TILE // width)
    walks = _walks((phi_q, phi_k), tuple(found.values()), rows)
    if walks is None:
        return None
    arguments: dict[str, Any] = {"walk_q": None, "walk_k": None, "programs_q": 0}
    total = 0
    for name, (walk, programs) in zip(found, walks, strict=True):
        arguments["walk_" + name[-1]] = walk
        total += programs
        if name == "phi_q":
            arguments["programs_q"] = programs
    arguments |= {"R": rank, "split": split, "WIDTH": width, "ROWS": rows}
    names = [name[-1] for name in found]
    tensors = [*names, "top_q", "top_k", *[f"{name}_out" for name in names]]
    plan = _plan(kernel, arguments, tensors, [], total)
    return plan, {name: (*t.shape[:-1], rank) for name, t in found.items()}


def _plan(
    kernel: Any, arguments: dict[str, Any], tensors: list[str], numbers: list[str], programs: int
) -> LaunchPlan:
    values = {name: arguments.get(name) for name in kernel.arg_names}
    # products that were merged with sums would be rounded once, where torch rounds twice
    options = {"enable_fp_fusion": False}
    return LaunchPlan(kernel, values, tensors, numbers, grid=programs, options=options)


def _walks(
    factors: tuple[Tensor, Tensor], walked: Sequence[Tensor], rows: int
) -> list[tuple[Any, int]] | None:
    """For each of `walked` a `FactorWalk`, and how many programs with so many rows it takes.

    None where the kernels cannot tell the batch dimensions apart.
    """
    from .triton_columns import FactorWalk

    tops, made = _top_sizes(*factors), []
    for tensor in walked:
        batch = tuple(tensor.shape[:-3])
        heads, n = tensor.shape[-3:-1]
        of_tops = _top_strides(tops, factors[0].shape[-1], tensor.dim() - 2)
        own = batch_strides("q", tensor, batch)
        sizes, (steps, top_steps) = collapse_batch(batch, [own, of_tops[:-1]])
        if len(sizes) > MAX_BATCH_DIMS:
            return None
        lead = MAX_BATCH_DIMS - len(sizes)
        sizes = [1] * lead + sizes
        strides = (*[0] * lead, *steps, *own_strides("q", tensor))
        top_strides = (*[0] * lead, *top_steps, of_tops[-1])
        walk = FactorWalk(n, sizes[1], sizes[2], heads, strides, top_strides)
        made.append((walk, -(-n // rows) * heads * sizes[0] * sizes[1] * sizes[2]))
    return made


def _top_sizes(phi_q: Tensor, phi_k: Tensor) -> list[int]:
    """Leading dimensions of `column_tops`: those of both factors, where neither is shared."""
    lead_q, lead_k = phi_q.shape[:-2][::-1], phi_k.shape[:-2][::-1]
    return [min(q, k) for q, k in zip(lead_q, lead_k, strict=False)][::-1]


def _top_strides(tops: list[int], rank: int, dims: int) -> list[int]:
    """Strides of `column_tops` over the leading dimensions of a matrix with so many."""
    strides, step = [], rank
    for size in reversed(tops[-dims:] if dims else []):
        strides.append(0 if size == 1 else step)
        step *= size
    return [0] * (dims - len(strides)) + strides[::-1]
