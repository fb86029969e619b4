"""Attention between the nodes of a graph with a number for their distance, and recipes for it.

As in Graphormer: one table for all layers, whose entries are the biases of the heads; what is too
far away has an entry, and so has padding.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site

HEADS, N, DIM, FARTHEST = 4, 24, 16, 7


class GraphAttention(nn.Module):
    """Nodes attend with a bias from the distances that each call brings."""

    def __init__(self, spatial: nn.Embedding) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.spatial = spatial

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor, distances: Tensor, nodes: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        scores = q @ k.mT * q.shape[-1] ** -0.5 + self.spatial(distances).movedim(-1, 1)
        scores = scores.masked_fill(~nodes[:, None, None, :], -torch.inf)
        out: Tensor = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class FixedGraphAttention(GraphAttention):
    """The same on one graph, whose distances belong to the model."""

    distances: Tensor

    def __init__(self, spatial: nn.Embedding, distances: Tensor) -> None:
        super().__init__(spatial)
        self.register_buffer("distances", distances)

    def forward(self, x: Tensor, nodes: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.distances.expand(len(x), -1, -1), nodes)


class GraphModel(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Embedding(FARTHEST, HEADS)
        self.layers = nn.ModuleList(GraphAttention(self.spatial) for _ in range(2))

    def forward(self, x: Tensor, distances: Tensor, nodes: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, distances, nodes)
        return x


class FixedGraphModel(nn.Module):
    """Two layers on one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Embedding(FARTHEST, HEADS)
        graph = distances(seed=9)[0]
        self.layers = nn.ModuleList(FixedGraphAttention(self.spatial, graph) for _ in range(2))

    def forward(self, x: Tensor, nodes: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, nodes)
        return x


def distances(graphs: int = 1, seed: int = 0) -> Tensor:
    """Lengths of the shortest paths in random graphs, int64 (B, N, N); 0 stands for padding."""
    draw = torch.Generator().manual_seed(seed)
    edges = torch.rand(graphs, N, N, generator=draw) < 1.6 / N
    reached = torch.eye(N, dtype=torch.bool).expand(graphs, -1, -1)
    steps = torch.full((graphs, N, N), FARTHEST - 1)  # far away, or not connected
    one_more = (reached | edges | edges.mT).float()
    for length in range(1, FARTHEST - 1):
        steps = torch.where(reached & (steps == FARTHEST - 1), length, steps)
        reached = reached.float() @ one_more > 0
    return steps


def make_inputs(graphs: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Graphs, the first of them with padding."""
    draw = torch.Generator().manual_seed(seed)
    nodes = torch.ones(graphs, N, dtype=torch.bool)
    nodes[0, -5:] = False
    lengths = distances(graphs, seed).masked_fill(~(nodes[:, :, None] & nodes[:, None]), 0)
    return {"x": torch.randn(graphs, N, DIM, generator=draw), "distances": lengths, "nodes": nodes}


def make_model(fixed: bool = False) -> nn.Module:
    """In evaluation mode, with a bias that matters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (FixedGraphModel() if fixed else GraphModel()).eval()


def make_fixed() -> nn.Module:
    """See `make_model`."""
    return make_model(fixed=True)


# -- recipes -------------------------------------------------------------------------------


class FlashGraph(PatchedAttention):
    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return ()  # each call reads the table

    def flashbias_forward(self, x: Tensor, distances: Tensor, nodes: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        built = {"lookup": {"table": self.spatial.weight.T, "code": distances}}
        out = self.score_bias(q, k, v, key_mask=nodes, built=built)
        return self.proj(out.transpose(1, 2).flatten(2))


class FlashFixedGraph(PatchedAttention):
    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.spatial.weight, self.distances)

    def flashbias_forward(self, x: Tensor, nodes: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        out = self.score_bias(q, k, v, key_mask=nodes)
        return self.proj(out.transpose(1, 2).flatten(2))


def describe(site: Site) -> Description:
    module = site.module
    if not isinstance(module, FixedGraphAttention):
        return Description(None, HEADS, N, N, DIM // HEADS, builders=("lookup",))
    bias = module.spatial.weight.T[:, module.distances].detach()
    return Description(bias, HEADS, N, N, DIM // HEADS)


def _recipe(name: str, attention: type[PatchedAttention]) -> Recipe:
    return Recipe(
        name=name.lower(),
        title=f"a toy: {name}",
        classes=(f"{__name__}.{name}",),
        library="torch",
        tested=">=2",
        attention=attention,
        describe=describe,
    )


GRAPH = _recipe("GraphAttention", FlashGraph)
FIXED = _recipe("FixedGraphAttention", FlashFixedGraph)
RECIPES = [GRAPH, FIXED]
