"""What an inspection runs in, and with: it leaves no trace, and names versions."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .. import __version__


def library_versions() -> dict[str, str]:
    """Versions of this package, Python and the libraries that matter; imports none of them."""
    versions = {"flashbias-convert": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "timm", "transformers", "torchvision"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@contextmanager
def leave_no_trace(model: nn.Module) -> Iterator[None]:
    """No gradients, autocast or inference tensors inside; random states as before after."""
    devices = {t.device for t in [*model.parameters(), *model.buffers()]}
    cuda = [device.index for device in devices if device.type == "cuda"]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        for kind in {"cpu"} | {device.type for device in devices if device.type == "cuda"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
