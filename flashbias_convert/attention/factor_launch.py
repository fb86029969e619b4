"""Launches the kernels of `triton_columns`, with all that depends on shapes worked out once."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..terms.constants import is_watched
from .factors import scale_size
from .launch_plan import MAX_PLANS, LaunchPlan, layout_of
from .strides import MAX_BATCH_DIMS, batch_strides, collapse_batch, own_strides, padded

#: Numbers that one program writes, about.
TILE = 2048

#: by what a launch looks like
_PLANS: dict[Hashable, LaunchPlan] = {}
_TOPS = ("top_q", "top_k")
_OUTS = ("out", "again")
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def is_served(*tensors: Tensor) -> bool:
    """Whether the kernels write the columns: on a card, for tensors that are real."""
    if torch.compiler.is_compiling():
        return False
    recorded = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    # a mode would miss a launch
    return not recorded and not is_watched() and all([_is_readable(t) for t in tensors])


def _is_readable(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return False
    if tensor.dim() - 3 > MAX_BATCH_DIMS:
        return False
    if tensor.is_cuda:
        return tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    # Triton's interpreter takes bf16 for raw bits
    return _INTERPRETED and tensor.dtype in (torch.float32, torch.float16)


def launch_columns(
    phi: Tensor,
    tops: Sequence[Tensor],
    split: int,
    outs: Sequence[Tensor],
    *,
    of_keys: bool,
    scale: float | Tensor | None,
) -> None:
    """Write the columns of one factor; see `factor_columns`.

    Args:
        phi: (*batch, H, N, R), with batch dimensions that `is_served` has allowed.
        tops: of both factors, see `factors.column_tops`; none for factors that need no balance.
        split: how many columns become triples: of high and low parts, or the same number three
            times for queries without a scale.
        outs: contiguous (*batch, H, N, COLUMNS), one or two of different dtypes; zeros are written
            past the last column.
        of_keys: it is phi_k.
        scale: by whose size it is divided, fp32 (H,) if heads differ in it.
    """
    scales = (scale,) if isinstance(scale, Tensor) else ()
    kind = (split, of_keys, scale is None)
    key = (phi.device, kind, *layout_of((phi, *tops[of_keys : of_keys + 1], *scales, *outs)))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _keep(key, _columns_plan(phi, tops, split, outs, of_keys, scale))
    numbers = () if scale is None or isinstance(scale, Tensor) else (scale_size(scale),)
    plan.run(
        phi.device,
        (phi, *tops, *scales, *outs),
        [_reciprocal(number) for number in numbers] if phi.is_cuda else numbers,
    )


def launch_gradient(
    found: Tensor, tops: Sequence[Tensor], split: int, out: Tensor, *, of_keys: bool
) -> None:
    """Write the gradient of one factor, contiguous (*batch, H, N, R) in any dtype that it has; see
    `column_gradients`."""
    key = (found.device, split, of_keys, *layout_of((found, tops[of_keys], out)))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _keep(key, _gradient_plan(found, tops, split, out, of_keys))
    plan.run(found.device, (found, *tops, out))


def _keep(key: Hashable, plan: LaunchPlan) -> LaunchPlan:
    if len(_PLANS) >= MAX_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan
    return plan


@lru_cache(maxsize=MAX_PLANS)
def _reciprocal(number: float) -> float:
    """1 / `number` as fp32 has it: what torch multiplies by to divide by a number on a card."""
    return ctypes.c_float(1.0 / ctypes.c_float(number).value).value


def _columns_plan(
    phi: Tensor,
    tops: Sequence[Tensor],
    split: int,
    outs: Sequence[Tensor],
    of_keys: bool,
    scale: float | Tensor | None,
) -> LaunchPlan:
    from .triton_columns import factor_columns_kernel as kernel

    columns = outs[0].shape[-1]
    low = 1 if of_keys else 2
    arguments = {
        "R": phi.shape[-1],
        "split": split,
        "COLUMNS": columns,
        "LOW": low if of_keys or scale is not None else -1,
        "DOWN": of_keys,
        "INVERSE": phi.is_cuda,
        "ROWS": max(1, TILE // columns),
    }
    scales = ["scales"] if isinstance(scale, Tensor) else []
    tensors = ["phi", *_TOPS[: len(tops)], *scales, *_OUTS[: len(outs)]]
    numbers = [] if scale is None or scales else ["size"]
    return _plan(kernel, arguments, tensors, numbers, phi, tops[of_keys] if tops else None)


def _gradient_plan(
    found: Tensor, tops: Sequence[Tensor], split: int, out: Tensor, of_keys: bool
) -> LaunchPlan:
    from .triton_columns import factor_gradients_kernel as kernel

    width = padded(out.shape[-1])
    arguments = {
        "R": out.shape[-1],
        "split": split,
        "WIDTH": width,
        "PARTNER": 2 if of_keys else 1,
        "DOWN": of_keys,
        "ROWS": max(1, TILE // width),
    }
    return _plan(kernel, arguments, ["found", *_TOPS, "out"], [], found, tops[of_keys])


def _plan(
    kernel: Any,
    arguments: dict[str, Any],
    tensors: list[str],
    numbers: list[str],
    walked: Tensor,
    top: Tensor | None,
) -> LaunchPlan:
    """A launch that walks a matrix, with `top` of the same factor."""
    from .triton_columns import FactorWalk

    heads, n = walked.shape[-3:-1]
    sizes, strides = _batch(walked, top)
    lead = MAX_BATCH_DIMS - len(sizes)
    sizes, (own, of_top) = [1] * lead + sizes, ([0] * lead + s for s in strides)
    head = 0 if top is None or top.shape[-3] == 1 else top.stride(-3)
    walk = FactorWalk(
        n, sizes[1], sizes[2], heads, (*own, *own_strides("q", walked)), (*of_top, head)
    )
    values = {name: arguments.get(name) for name in kernel.arg_names} | {"walk": walk}
    return LaunchPlan(
        kernel,
        values,
        tensors,
        numbers,
        grid=-(-n // arguments["ROWS"]) * heads * math.prod(sizes),
        # products that were merged with sums would be rounded once, where torch rounds twice
        options={"enable_fp_fusion": False},
    )


def _batch(walked: Tensor, top: Tensor | None) -> tuple[list[int], list[list[int]]]:
    """Sizes of batch dimensions, and strides over them of a matrix and of what belongs to it."""
    batch = tuple(walked.shape[:-3])
    both = [batch_strides("q", t, batch) for t in (walked, walked if top is None else top)]
    return collapse_batch(batch, both)
