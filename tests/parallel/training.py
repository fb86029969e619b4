"""What every process does: train the terms of a wrapped model on its share of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.toy import make_input
from tests.training.models import terms, train_terms, undropped

STEPS = 3


def data() -> tuple[Tensor, Tensor]:
    """Four inputs and targets; two processes have two each."""
    return tuple(torch.cat([make_input(s), make_input(s + 1)]) for s in (1, 3))  # type: ignore[return-value]


def model() -> nn.Module:
    made = undropped()
    train_terms(made)
    return made.train()


def steps(trained: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss of each step."""
    wanted = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (trained(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train(rank: int, world: int) -> dict[str, Any]:
    """Losses and terms, by DDP and by FSDP2."""
    inputs, targets = (part.chunk(world)[rank] for part in data())
    found: dict[str, Any] = {}
    own = model()
    found["ddp"] = steps(DistributedDataParallel(own), inputs, targets), terms(own)
    own = model()
    mesh = init_device_mesh("cpu", (world,))
    for block in own.blocks:  # type: ignore[union-attr]
        fully_shard(block["attn"], mesh=mesh)
    fully_shard(own, mesh=mesh)
    losses = steps(own, inputs, targets)
    sharded = {k: v.full_tensor() for k, v in terms(own).items()}  # type: ignore[attr-defined]
    parts = [p.to_local().shape for n, p in own.named_parameters() if n in sharded]
    found["fsdp"] = losses, sharded
    found["parts"] = parts
    own.eval()
    with torch.no_grad():
        found["served"] = own(data()[0])
    return found
