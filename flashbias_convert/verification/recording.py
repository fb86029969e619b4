"""Run a model and keep what some of its modules return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..inputs import Batch
from .outputs import tensors_of


@dataclass
class Record:
    """One run of a model.

    Attributes:
        outputs: the tensors that the model returned, by name.
        sites: module name -> the tensors of each of its calls, in order.
        order: names of the modules, one entry per call, in the order in which they returned.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    sites: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


@torch.inference_mode()
def run_recorded(model: nn.Module, batch: Batch, names: Iterable[str]) -> Record:
    """Run a model on a batch and keep the outputs of the modules called `names`.

    Their forward is wrapped for the length of the call, not hooked: some parents call
    ``module.forward(x)``, past every hook.

    Args:
        model: in evaluation mode; it is as before afterwards.
        batch: on the model's device, in its dtype.
        names: of modules.
    """
    record = Record()
    wrapped: list[nn.Module] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            module.forward = _wrapper(module.forward, name, record)
            wrapped.append(module)
        with torch.autocast(_device_type(model), enabled=False):
            record.outputs = tensors_of(model(*batch.args, **batch.kwargs))
    finally:
        for module in wrapped:
            del module.forward  # the attribute of the instance; the class has its own
    return record


def _wrapper(forward: Callable[..., Any], name: str, record: Record) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        # a copy: the caller may go on to add to it in place
        kept = {key: tensor.clone() for key, tensor in tensors_of(output).items()}
        record.sites.setdefault(name, []).append(kept)
        record.order.append(name)
        return output

    return call


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")
