"""Heads of a patched model split over the processes of a mesh."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from flashbias_convert.parallel import ColwiseFused, shard_sites
from flashbias_convert.swap import patched_modules


def by_heads(model: nn.Module, mesh: Any) -> nn.Module:
    """The projections of attention by columns and rows, and the terms with them.

    Args:
        model: a patched BLOOM, or a patched Swin of timm; it is changed.
        mesh: one dimension.
    """
    for site in patched_modules(model):
        if hasattr(site, "query_key_value"):
            plan = {"query_key_value": ColwiseParallel(), "dense": RowwiseParallel()}
        else:
            plan = {"qkv": ColwiseFused(), "proj": RowwiseParallel()}
        parallelize_module(site, mesh, plan)
    shard_sites(model, mesh)
    return model
