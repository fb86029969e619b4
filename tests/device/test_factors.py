"""Factors of a bias that is made on a device: all but ranks stays there."""

from __future__ import annotations

import torch

from flashbias_convert.decompose.randomised import decompose_quickly, quick_factors
from flashbias_convert.terms import Dense, LowRank


def test_factors_are_made_where_the_bias_is(device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    few = torch.randn(1, 2, 64, 4, generator=draw) @ torch.randn(1, 2, 4, 64, generator=draw)
    bias = torch.cat([few, 4 * torch.randn(1, 1, 64, 64, generator=draw)], 1)
    made = decompose_quickly(bias.to(device), rank=8).bias
    assert {t.device for term in made.terms for t in term.tensors().values()} == {device}
    here = quick_factors(bias.to(device), 8)
    assert here.phi_q.device == here.phi_k.device == device
    centred = bias - bias.mean(-1, keepdim=True)
    torch.testing.assert_close(
        here.dense(64, 64).cpu()[:, :2], centred[:, :2], rtol=1e-4, atol=1e-4
    )


def test_energies_choose_there_what_they_choose_on_the_cpu(device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    few = torch.randn(1, 1, 64, 4, generator=draw) @ torch.randn(1, 1, 4, 64, generator=draw)
    bias = torch.cat([few, 4 * torch.randn(1, 1, 64, 64, generator=draw)], 1)
    found, expected = (decompose_quickly(b) for b in (bias.to(device), bias))
    kinds = [type(term) for term in found.bias.terms]
    assert kinds == [type(term) for term in expected.bias.terms]
    assert set(kinds) <= {LowRank, Dense}
    assert [d.term for d in found.decisions] == [d.term for d in expected.decisions]
