"""Models where they are compared: on a device, in a dtype, beside the wider dtype."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..errors import UsageError
from ..patched_attention import PatchedAttention

#: what the original's rounding is measured against
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
}


def dtype_of(model: nn.Module) -> torch.dtype:
    """Of the first parameter of floating point; float32 without one."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def device_of(model: nn.Module) -> torch.device:
    """Of the first parameter; the CPU without one."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype that tells rounding from errors; raises UsageError where there is none."""
    if dtype not in WIDER:
        raise UsageError(
            f"{dtype_name(dtype)} has no wider dtype that could tell rounding from errors",
            f"compare in {', '.join(map(dtype_name, WIDER))}",
        )
    return WIDER[dtype]


def placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model, in evaluation mode, if it is there and of that dtype already, else a copy."""
    tensors = [*model.parameters(), *model.buffers()]
    floats = [p for p in model.parameters() if p.is_floating_point()]
    if all(t.device == device for t in tensors) and all(p.dtype == dtype for p in floats):
        return model
    made = copy.deepcopy(model).to(device=device, dtype=dtype)
    _forget(made)
    return made


def _forget(model: nn.Module) -> None:
    """Drop what modules keep that they made of their weights: a cast leaves it in the old dtype.

    TinyViT of older versions of timm keeps its bias so. What keeps anything drops it in training
    mode, by a `train` of its own.
    """
    for module in model.modules():
        if type(module).train is nn.Module.train:
            continue
        if not any(isinstance(part, PatchedAttention) for part in module.modules()):
            module.train(True)
            module.train(False)


def dtype_name(dtype: torch.dtype) -> str:
    """Without the name of its library."""
    return str(dtype).removeprefix("torch.")
