"""How a site projects its pairs to a bias: by its own layers, or by one kernel in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_calls

from .attention.backends import device_problem
from .attention.projection import fits, project_pairs

#: classes with a forward of their own that computes a linear layer, or a layer norm in fp32, where
#: `precision` says nothing else: Boltz 2.2, OpenFold 2.2, OpenFold 3 0.5 and Protenix 2.0
_LINEAR_LAYERS = {
    "boltz.model.layers.triangular_attention.primitives.Linear",
    "openfold.model.primitives.Linear",
    "openfold3.core.model.primitives.linear.Linear",
    "protenix.model.modules.primitives.Linear",
    "protenix.model.triangular.layers.OpenfoldLinear",
}
_NORMS = {
    "boltz.model.layers.triangular_attention.primitives.LayerNorm",
    "openfold.model.primitives.LayerNorm",
    "openfold3.core.model.primitives.normalization.LayerNorm",
    "protenix.model.layer_norm.layer_norm.FusedLayerNorm",
    "protenix.model.triangular.layers.OpenFoldLayerNorm",
}
#: backends of a site under which its own layers are asked, as references are
_WITHOUT_KERNELS = ("eager", "sdpa")


def projected_pairs(
    site: Any, z: Tensor, linear: nn.Module, norm: nn.Module | None = None
) -> Tensor:
    """``linear(norm(z))`` with the heads in front, shape (*batch, H, N, M).

    By the kernel for calls without gradients on a card, where both layers are of a class that is
    known and nothing has changed them: others, hooks, adapters, quantised weights and whatever else
    stands in their place are asked.

    Args:
        site: the attention, patched or not.
        z: pair representation, shape (*batch, N, M, C).
        linear: C channels to H heads, with or without a bias.
        norm: a layer norm over the channels, with or without scale and shift, which works in fp32.
    """
    if _by_kernel(site, z, linear, norm):
        layer: Any = linear
        given: Any = (None, None, 1e-5)
        if norm is not None:
            own = norm._parameters
            given = (own.get("weight"), own.get("bias"), norm.eps)
        scale, shift, eps = given
        return project_pairs(
            z, scale, shift, layer.weight, layer.bias,
            eps=eps, norms=norm is not None, dtype=_dtype(z),
        )  # fmt: skip
    projected: Tensor = linear(z if norm is None else norm(z))
    return projected.movedim(-1, -3)


def _dtype(z: Tensor) -> torch.dtype:
    """Of the product, as linear layers have it."""
    kind = z.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else z.dtype


def _by_kernel(site: Any, z: Tensor, linear: nn.Module, norm: nn.Module | None) -> bool:
    terms = getattr(site, "score_bias", None)
    if terms is None or terms.backend in _WITHOUT_KERNELS:
        return False
    if not _is_linear(linear) or not (norm is None or _is_norm(norm, z.shape[-1])):
        return False
    tensors = [z, *(t for layer in (linear, norm) for t in _weights(layer))]
    if any(type(t) not in (Tensor, nn.Parameter) or t.device != z.device for t in tensors):
        return False
    if not _same_dtype(z, linear) or not fits(z, linear.weight, _dtype(z)):  # type: ignore[arg-type]
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return not _is_transformed() and device_problem(z.device) is None


def _same_dtype(z: Tensor, linear: nn.Module) -> bool:
    """Whether the layer itself takes such pairs, and gives what `_dtype` says."""
    if not torch.is_autocast_enabled(z.device.type):
        return linear.weight.dtype == z.dtype
    # OpenFold's layers leave autocast for bf16, and give bf16
    own = type(linear).forward is not nn.Linear.forward
    return not (own and z.dtype == torch.bfloat16 and _dtype(z) != z.dtype)


def _weights(layer: nn.Module | None) -> list[Tensor]:
    return [] if layer is None else [t for t in layer._parameters.values() if t is not None]


def _is_linear(layer: nn.Module) -> bool:
    known = type(layer).forward is nn.Linear.forward or _name(layer) in _LINEAR_LAYERS
    return known and _is_untouched(layer) and getattr(layer, "precision", None) is None


def _is_norm(layer: nn.Module, channels: int) -> bool:
    known = type(layer).forward is nn.LayerNorm.forward or _name(layer) in _NORMS
    if not known or not _is_untouched(layer):
        return False
    shape = getattr(layer, "normalized_shape", None) or getattr(layer, "c_in", None)
    return shape == (channels,)


def _is_untouched(layer: nn.Module) -> bool:
    """Whether a call runs the forward of its class alone, on a weight and a bias at most."""
    own = {"weight", "bias"}.issuperset(layer._parameters) and not layer._modules
    return own and is_uncalled(layer)


def is_uncalled(module: nn.Module) -> bool:
    """Whether nobody would notice that a module is not called: no hooks, no forward of its own."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module_calls._global_forward_hooks,
        module_calls._global_forward_pre_hooks,
    )
    return not any(hooks) and "forward" not in module.__dict__ and "_hf_hook" not in module.__dict__


def _name(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _is_transformed() -> bool:
    """Whether torch.func, or derivatives in forward mode, see torch's operations."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
