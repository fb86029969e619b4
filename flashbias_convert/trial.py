"""Modules that are known by their parts: tried out with random numbers before they are trusted.

Parts do not say what a forward computes. A recipe runs it once, on a copy, beside attention that is
written out, and refuses a module that returns anything else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .recipe import UnsupportedSite


def has_parts(module: nn.Module, *names: str, kind: type | tuple[type, ...] = object) -> bool:
    """Whether a module has attributes of these names, all of a kind; without one, None will do."""
    absent = object()
    found = [getattr(module, name, absent) for name in names]
    return all(part is not absent and isinstance(part, kind) for part in found)


class Trial:
    """A copy of a module, and numbers to run it with, the same ones in every trial.

    Args:
        module: the module, which stays as it is.
        what: whose parts it has, for the message.

    Attributes:
        twin: the copy, in float64 on the CPU, in eval mode, without gradients; what it holds may
            be written to.
    """

    def __init__(self, module: nn.Module, what: str) -> None:
        self.twin: Any = copy.deepcopy(module).double().cpu().eval().requires_grad_(False)
        self._what = what
        self._generator = torch.Generator().manual_seed(0)

    def draw(self, *shape: int) -> Tensor:
        """Normally distributed numbers, float64, of this shape."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def redraw(self, parameter: Tensor, std: float = 1.0) -> None:
        """Fill a parameter of the copy: a new one may be zero, which hides what it does."""
        nn.init.normal_(parameter, std=std, generator=self._generator)

    def require(self, call: Callable[[], Any], right: Tensor) -> None:
        """Refuse the module if it computes something else than its parts suggest.

        Args:
            call: runs the forward of the copy.
            right: what it should return, written out.

        Raises:
            UnsupportedSite: it raises, returns no tensor, or another one.
        """
        try:
            with torch.no_grad():
                found = call()
        except Exception as error:
            reason = f"its forward cannot be tried out: {type(error).__name__}: {error}"
            raise UnsupportedSite(reason) from error
        if not _is_close(found, right):
            raise UnsupportedSite(f"it has the parts of {self._what}, but computes something else")


def _is_close(found: Any, right: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.dtype != right.dtype or found.shape != right.shape:
        return False
    return torch.allclose(found, right, rtol=1e-6, atol=1e-8)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    scale: float | Tensor = 1.0,
    cosine: bool = False,
) -> Tensor:
    """Attention written out, heads side by side, (*batch, N, H * D).

    Args:
        q, k, v: shapes (*batch, H, N, D), (*batch, H, M, D), (*batch, H, M, D).
        bias: added to the scores, of any shape that fits (*batch, H, N, M).
        scale: of the scores; one number, or H, one for each head.
        cosine: whether queries and keys are normalised.

    Raises:
        UnsupportedSite: a scale of another size, which `flashbias_attention` would not take.
    """
    if cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    if isinstance(scale, Tensor):
        if scale.numel() != q.shape[-3]:
            shape, heads = tuple(scale.shape), q.shape[-3]
            raise UnsupportedSite(f"its scale is a tensor of shape {shape}, for {heads} heads")
        scale = scale.reshape(-1, 1, 1)
    weights = (scale * (q @ k.mT) + bias).softmax(-1)
    return (weights @ v).transpose(-3, -2).flatten(-2)


def try_windows(
    trial: Trial,
    bias: Tensor,
    *,
    project: Callable[[Tensor], Tensor] | None = None,
    handed: Mapping[str, Any] | None = None,
    **how: Any,
) -> None:
    """`Trial.require` of attention in windows, without a mask and with one.

    Args:
        trial: of a module with `num_heads`, `qkv` and `proj`, whose forward takes tokens
            (B * nW, N, C) and ``mask=``, (nW, N, N) or None.
        bias: of a window, shape (H, N, N).
        project: tokens -> queries, keys and values, (B * nW, N, 3 H D); the copy's `qkv` if None.
        handed: what else the forward is called with.
        **how: keyword arguments of `plain_attention`.

    Raises:
        UnsupportedSite: see `Trial.require`.
    """
    twin, n, (batch, windows) = trial.twin, bias.shape[-1], (2, 2)
    x = trial.draw(batch * windows, n, twin.qkv.in_features)
    mask = trial.draw(windows, n, n)
    made = twin.qkv(x) if project is None else project(x)
    q, k, v = made.unflatten(-1, (3, twin.num_heads, -1)).permute(2, 0, 3, 1, 4)
    for given in (None, mask):
        added = bias if given is None else bias + mask.repeat(batch, 1, 1)[:, None]
        right = twin.proj(plain_attention(q, k, v, added, **how))
        trial.require(partial(twin, x, mask=given, **handed or {}), right)
