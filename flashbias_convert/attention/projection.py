"""The bias of a site from a pair representation: a norm, a linear layer and heads in front.

torch's layer norm of many short rows takes most of such a call, and what it writes is read again
only to be projected to a few heads. Here one kernel reads the pairs once and writes the bias as the
attention kernel reads it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch_plan import MAX_PLANS, LaunchPlan, layout_of
from .library import refuse_gradients, register
from .packing import ROW_STEP
from .strides import padded

#: more channels, or heads, do not fit into one tile
MAX_CHANNELS, MAX_HEADS = 256, 64
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: cells of the pairs in one step of the kernel
_CELLS = 8192
_PLANS: dict[Hashable, LaunchPlan] = {}


def project_pairs_formula(
    z: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    norms: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The same by torch's operations, the reference of `project_pairs`; see there."""
    x = z
    if norms:
        wide = torch.promote_types(z.dtype, torch.float32)
        scale, shift = (None if t is None else t.to(wide) for t in (scale, shift))
        x = F.layer_norm(z.to(wide), z.shape[-1:], scale, shift, eps)
    out = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return out.movedim(-1, -3)


def _project(
    z: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    norms: bool,
    dtype: torch.dtype,
) -> Tensor:
    out = _empty(z, weight, dtype)
    if not out.numel():
        return out
    given = (scale, shift, bias)
    tensors = tuple(weight if t is None else t.contiguous() for t in given)
    weight = weight.contiguous()
    has = tuple(t is not None for t in given)
    key = (z.device, layout_of((z, weight, *tensors)), has, eps, norms, dtype)
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = _make_plan(z, out, len(weight), has, eps, norms)
    plan.run(z.device, (z, *tensors, weight, out))
    return out


def _empty(z: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, N, M) with rows that begin at whole vectors, see `packing.vector_rows_of`."""
    batch, n, m, _ = z.shape
    wide = -(-m // ROW_STEP) * ROW_STEP
    return z.new_empty((batch, weight.shape[0], n, wide), dtype=dtype)[..., :m]


def _fake(z: Tensor, *others: Any) -> Tensor:
    """What a trace sees instead; arguments as those of `_project`."""
    _scale, _shift, weight, *_, dtype = others
    return _empty(z, weight, dtype)


def _make_plan(
    z: Tensor, out: Tensor, heads: int, has: tuple[bool, ...], eps: float, norms: bool
) -> LaunchPlan:
    """Arguments and grid."""
    from .triton_projection import project_pairs_kernel

    batch, n, m, channels = z.shape
    block = max(16, _CELLS // padded(channels))
    names = ("z_ptr", "scale_ptr", "shift_ptr", "bias_ptr", "weight_ptr", "out_ptr")
    arguments = {
        **dict.fromkeys(names),
        **dict(zip(("z_b", "z_i", "z_j", "z_c"), z.stride(), strict=True)),
        **dict(zip(("HAS_SCALE", "HAS_SHIFT", "HAS_BIAS"), has, strict=True)),
        "N": n,
        "M": m,
        "row": out.stride(-2),
        "eps": eps,
        "C": channels,
        "H": heads,
        "BLOCK_C": padded(channels),
        "BLOCK_H": padded(heads),
        "BLOCK_J": block,
        "NORMS": norms,
    }
    return LaunchPlan(
        project_pairs_kernel,
        {name: arguments[name] for name in project_pairs_kernel.arg_names},
        names,
        grid=batch * n * -(-m // block),
        options={},
    )


_op = register("project_pairs", _project, _fake, refuse_gradients("no backward pass"))


def fits(z: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel takes such pairs and weights; where it runs is asked elsewhere."""
    heads, channels = weight.shape
    dtypes = {z.dtype, weight.dtype, dtype}
    return (
        z.dim() >= 3
        and 0 < channels <= MAX_CHANNELS
        and 0 < heads <= MAX_HEADS
        and dtypes <= set(DTYPES)
    )


def project_pairs(
    z: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    norms: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The projection of normed pairs, by the Triton kernel; no gradient goes through it.

    Args:
        z: pair representation, shape (*batch, N, M, C).
        scale, shift: of the layer norm, shape (C,), or None.
        weight: of the linear layer, shape (H, C).
        bias: of the linear layer, shape (H,), or None.
        eps: of the norm.
        norms: whether there is a norm at all.
        dtype: of the result and of the product; default that of z.

    Returns:
        Tensor of shape (*batch, H, N, M), whose rows begin at whole vectors.

    Raises:
        ValueError: sizes or dtypes that the kernel does not take, see `fits`.
    """
    dtype = dtype or z.dtype
    if not fits(z, weight, dtype) or z.shape[-1] != weight.shape[1]:
        raise ValueError(f"cannot project {tuple(z.shape)} with weights {tuple(weight.shape)}")
    flat = z.reshape(math.prod(z.shape[:-3]), *z.shape[-3:])
    out: Tensor = _op(flat, scale, shift, weight, bias, eps, norms, dtype)
    return out.squeeze(0) if z.dim() == 3 else out.unflatten(0, z.shape[:-3])
