"""How a site projects its pairs to a bias: by its own layers, or by one kernel in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .attention.backends import device_problem
from .attention.projection import fits, project_pairs

#: backends of a site under which its own layers are asked, as references are
_WITHOUT_KERNELS = ("eager", "sdpa")


def projected_pairs(
    site: Any, z: Tensor, linear: nn.Module, norm: nn.Module | None = None
) -> Tensor:
    """``linear(norm(z))`` with the heads in front, shape (*batch, H, N, M).

    By the kernel for calls without gradients on a card, where both layers are what they were built
    as: hooks, adapters, quantised weights and whatever else stands in their place are asked.

    Args:
        site: the attention, patched or not.
        z: pair representation, shape (*batch, N, M, C).
        linear: C channels to H heads, with or without a bias.
        norm: a layer norm over the channels, with or without scale and shift, which works in fp32.
    """
    if _by_kernel(site, z, linear, norm):
        layer: Any = linear
        given: Any = (None, None, 1e-5) if norm is None else (norm.weight, norm.bias, norm.eps)
        scale, shift, eps = given
        return project_pairs(
            z, scale, shift, layer.weight, layer.bias,
            eps=eps, norms=norm is not None, dtype=_dtype(z),
        )  # fmt: skip
    own: Tensor = linear(z if norm is None else norm(z))
    return own.movedim(-1, -3)


def _dtype(z: Tensor) -> torch.dtype:
    """Of the product, as linear layers have it."""
    kind = z.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else z.dtype


def _by_kernel(site: Any, z: Tensor, linear: nn.Module, norm: nn.Module | None) -> bool:
    terms = getattr(site, "score_bias", None)
    if terms is None or terms.backend in _WITHOUT_KERNELS:
        return False
    if not _is_plain(linear) or not isinstance(linear, nn.Linear):
        return False
    if norm is not None and not _is_plain(norm):
        return False
    tensors = [z, *(t for layer in (linear, norm) for t in _weights(layer))]
    if any(type(t) not in (Tensor, nn.Parameter) or t.device != z.device for t in tensors):
        return False
    mixed = not torch.is_autocast_enabled(z.device.type) and linear.weight.dtype != z.dtype
    if mixed or not fits(z, linear.weight, _dtype(z)):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return not _is_transformed() and device_problem(z.device) is None


def _weights(layer: nn.Module | None) -> list[Tensor]:
    return [] if layer is None else [t for t in (layer.weight, layer.bias) if t is not None]  # type: ignore[misc]


def _is_plain(layer: nn.Module) -> bool:
    """Whether nothing but its own forward runs in a call, on its own weight and bias."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    taken = "forward" in layer.__dict__ or "_hf_hook" in layer.__dict__
    return not taken and not any(hooks) and not layer._modules


def _is_transformed() -> bool:
    """Whether torch.func, or derivatives in forward mode, see torch's operations."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
