"""The checked arguments of one attention call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class AttentionArguments:
    """Everything but q, k, v and the bias.

    Attributes:
        scale: multiplies q . k: a number, or a tensor with one entry per query head (H,).
        causal: query i may attend to keys up to position query_start + i.
        query_start: position of the first query among the keys, an int or a tensor over batch.
        key_mask: boolean (*batch, M), True = attend.
        cosine: normalise the rows of q and k first.
        gate: the output is multiplied by its sigmoid; (*batch, H, N, Dv) or broadcastable.
    """

    scale: float | Tensor
    causal: bool
    query_start: int | Tensor
    key_mask: Tensor | None
    cosine: bool
    gate: Tensor | None = None

    def scale_for_heads(self, q: Tensor, dtype: torch.dtype) -> float | Tensor:
        """The scale in a shape that multiplies scores (*batch, H, N, M)."""
        if isinstance(self.scale, Tensor):
            return self.scale.to(device=q.device, dtype=dtype)[:, None, None]
        return self.scale


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | Tensor | None,
    causal: bool,
    query_start: int | Tensor | None,
    key_mask: Tensor | None,
    cosine: bool,
    gate: Tensor | None = None,
) -> AttentionArguments:
    """Check a call and fill in its defaults. Reads shapes and dtypes only, never values.

    Raises:
        ValueError: shapes that do not fit; the message names the arguments.
        TypeError: dtypes that do not fit.
    """
    _check_qkv(q, k, v)
    heads, n, m = q.shape[-3], q.shape[-2], k.shape[-2]
    batch = tuple(q.shape[:-3])
    if scale is None:
        scale = 1.0 if cosine else q.shape[-1] ** -0.5
    if isinstance(scale, Tensor):
        scale = _check_scale(scale, heads)
    elif not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number or a tensor, got {type(scale).__name__}")
    if key_mask is not None:
        _check_key_mask(key_mask, batch, m)
    if query_start is None:
        query_start = m - n
    elif isinstance(query_start, Tensor):
        _check_query_start(query_start, batch)
    if gate is not None:
        _check_gate(gate, q, (*q.shape[:-1], v.shape[-1]))
    return AttentionArguments(scale, causal, query_start, key_mask, cosine, gate)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() < 3:
            raise ValueError(f"{name} must have shape (*batch, H, N, D), got {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(
                f"q, k and v must share dtype and device, got q {q.dtype} on {q.device} "
                f"and {name} {x.dtype} on {x.device}"
            )
    problem = _shapes_problem(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    if problem is not None:
        raise ValueError(
            f"{problem}, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )


def _shapes_problem(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> str | None:
    if q[:-3] != k[:-3] or k[:-3] != v[:-3]:
        return "q, k and v must have the same batch dimensions"
    if q[-1] != k[-1]:
        return "q and k must have the same head size"
    if k[-2] != v[-2]:
        return "k and v must have the same number of keys"
    if k[-3] != v[-3] or k[-3] == 0 or q[-3] % k[-3]:
        return "k and v need the same number of heads, one that divides the heads of q"
    return "there must be at least one key" if k[-2] == 0 else None


def _check_scale(scale: Tensor, heads: int) -> float | Tensor:
    if scale.numel() == heads and scale.squeeze().dim() <= 1:
        return scale.reshape(heads)
    if torch.jit.is_tracing() and scale.dim() == 0 and not scale.requires_grad:
        return float(scale)  # sizes, and what is made of them, are tensors there
    raise ValueError(
        f"scale must be a number or a tensor with one entry for each of the {heads} heads, "
        f"got shape {tuple(scale.shape)}"
    )


def _check_key_mask(mask: Tensor, batch: tuple[int, ...], m: int) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be boolean (True = attend), got {mask.dtype}")
    if mask.dim() == 0 or mask.shape[-1] != m or not broadcasts(tuple(mask.shape[:-1]), batch):
        raise ValueError(
            f"key_mask must have shape (*batch, M) = {(*batch, m)} or broadcast to it, "
            f"got {tuple(mask.shape)}"
        )


def _check_query_start(start: Tensor, batch: tuple[int, ...]) -> None:
    if start.is_floating_point() or not broadcasts(tuple(start.shape), batch):
        raise ValueError(
            f"query_start must be an integer, or integers that broadcast to the batch {batch}, "
            f"got {start.dtype} of shape {tuple(start.shape)}"
        )


def _check_gate(gate: Tensor, q: Tensor, output: tuple[int, ...]) -> None:
    if not gate.is_floating_point() or gate.device != q.device:
        raise TypeError(
            f"gate must be of floating point on {q.device}, got {gate.dtype} on {gate.device}"
        )
    if gate.dim() < 3 or not broadcasts(tuple(gate.shape), output):
        raise ValueError(
            f"gate must have shape (*batch, H, N, Dv) = {output} or broadcast to it, "
            f"got {tuple(gate.shape)}"
        )


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` expands to `target` exactly, right-aligned."""
    if len(shape) > len(target):
        return all(s == 1 for s in shape[: len(shape) - len(target)]) and broadcasts(
            shape[len(shape) - len(target) :], target
        )
    aligned = target[len(target) - len(shape) :]
    return all(s in (1, t) for s, t in zip(shape, aligned, strict=True))
