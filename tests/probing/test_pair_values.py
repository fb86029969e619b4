"""A bias that looks up a table for every pair, as Graphormer's of distances, is known for that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import Lookup, ScoreBias, SiteProbe, flashbias_attention, probe_model
from flashbias_convert.probing.pair_values import distinct_values

from .architectures import esmfold

H, N, D, FARTHEST = 3, 20, 4, 6


class GraphAttention(nn.Module):
    """Nodes attend with a number for their distance in the graph."""

    def __init__(self, fused: bool = False, noise: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.fused, self.noise = H, fused, noise
        self.qkv = nn.Linear(8, 3 * H * D)
        self.spatial = nn.Embedding(FARTHEST, H)

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        bias = self.spatial(distances).movedim(-1, 1)
        bias = bias + self.noise * x.sum(-1)[:, None, None] * x[:, None, :, :1]
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return (q @ k.mT * D**-0.5 + bias).softmax(-1) @ v


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    distances = torch.randint(0, FARTHEST, (2, N, N), generator=draw)
    return {"x": torch.randn(2, N, 8, generator=draw), "distances": distances}


def probe(model: nn.Module) -> SiteProbe:
    (site,) = probe_model(model.eval(), inputs()).sites
    return site


@pytest.mark.parametrize("fused", [False, True])
def test_a_table_of_distances(fused: bool) -> None:
    torch.manual_seed(0)
    site = probe(GraphAttention(fused))
    assert site.kind == "input-dependent" and site.term == "lookup from a builder", site
    assert f"a table of {FARTHEST} values" in site.detail


def test_what_is_no_table_is_not_called_one() -> None:
    torch.manual_seed(0)
    assert "lookup" not in probe(GraphAttention(noise=0.5)).term


def test_a_lookup_is_exact() -> None:
    torch.manual_seed(0)
    model, given = GraphAttention().double(), inputs()
    x = given["x"].double()
    q, k, v = model.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
    table = model.spatial.weight.T.detach()
    bias = ScoreBias((Lookup(table=table, code=given["distances"].int()),), H)
    out = flashbias_attention(q, k, v, bias, backend="eager")
    # tables are fp32, as the weights of this embedding were drawn
    torch.testing.assert_close(out, model(x, given["distances"]), rtol=1e-12, atol=1e-12)


def test_groups_within_rounding() -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(5, 2, generator=draw).double()
    codes = torch.randint(0, 5, (3, 8, 8), generator=draw)
    samples = table[codes].movedim(-1, 1)
    noisy = samples + 1e-7 * (torch.rand(samples.shape, generator=draw).double() - 0.5)
    nothing = torch.zeros(8, 8, dtype=torch.bool)
    assert distinct_values(noisy[:1], noisy[1:], nothing, 1e-7) == 5
    assert distinct_values(noisy[:1], noisy[1:], nothing, 1e-10) is None
    spoiled = noisy.clone()
    spoiled[:, :, 3] = torch.randn(3, 2, 8, generator=draw).double()
    hidden = nothing.clone()
    hidden[3] = True
    assert distinct_values(spoiled[:1], spoiled[1:], nothing, 1e-7) is None
    assert distinct_values(spoiled[:1], spoiled[1:], hidden, 1e-7) == 5


def test_rows_that_share_a_bias_share_no_values() -> None:
    """A bias for each structure, which all rows of a triangle add, is no table."""
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 1, 3, 8, 8, generator=draw).double()
    nothing = torch.zeros(8, 8, dtype=torch.bool)
    rows = [one.repeat(16, 1, 1, 1) for one in (first, second)]
    assert distinct_values(rows[0], rows[1], nothing, 1e-7) is None
    assert distinct_values(rows[0], rows[0], nothing, 1e-7) is None


def test_values_of_one_input_are_no_table_for_every_input() -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 4, (2, 8, 8), generator=draw)
    nothing = torch.zeros(8, 8, dtype=torch.bool)
    values = torch.arange(8.0).double()
    own, other, mixed = (values[codes + by][:, None] for by in (0, 4, 2))
    assert distinct_values(own[:1], own[1:], nothing, 1e-7) == 4
    assert distinct_values(own[:1], other[1:], nothing, 1e-7) is None
    assert distinct_values(own[:1], mixed[1:], nothing, 1e-7) is None


def test_triangles_are_no_table() -> None:
    for site in probe_model(*esmfold()).sites:
        assert site.kind == "input-dependent" and "lookup" not in site.term, site
