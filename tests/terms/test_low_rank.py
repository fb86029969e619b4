"""A product of two thin matrices, with a rank for each head."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.terms import LowRank

from .builders import Maker


def factors(rank: int = 3, heads: int = 3, batch: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    x = Maker()
    return {"phi_q": x.numbers(*batch, heads, 4, rank), "phi_k": x.numbers(*batch, heads, 5, rank)}


def test_each_cell_is_the_product_of_a_row_and_a_column() -> None:
    own = factors(batch=(2,))
    term = LowRank(**own)
    dense = term.dense(4, 5)
    assert dense.shape == (2, 3, 4, 5) and term.batch_shape() == (2,)
    for b in range(2):
        for h in range(3):
            for i in range(4):
                for j in range(5):
                    pairs = zip(own["phi_q"][b, h, i], own["phi_k"][b, h, j], strict=True)
                    assert dense[b, h, i, j] == sum(float(q) * float(k) for q, k in pairs)


def test_columns_past_the_rank_of_a_head_are_ignored() -> None:
    own = factors()
    dense = LowRank(**own, ranks=(2, 0, 3)).dense(4, 5)
    for h, rank in enumerate((2, 0, 3)):
        thin = {name: t[h : h + 1, :, :rank] for name, t in own.items()}
        assert torch.equal(dense[h : h + 1], LowRank(**thin).dense(4, 5))
    assert not torch.equal(dense, LowRank(**own).dense(4, 5))
    assert (dense[1] == 0).all()


def test_what_lies_past_the_rank_may_be_anything() -> None:
    own = factors()
    expected = LowRank(**own, ranks=(1, 1, 1)).dense(4, 5)
    for t in own.values():
        t[..., 1:] = 1e4
    assert torch.equal(LowRank(**own, ranks=(1, 1, 1)).dense(4, 5), expected)


def test_head_ranks_default_to_all_columns() -> None:
    assert LowRank(**factors()).head_ranks() == (3, 3, 3)
    assert LowRank(**factors(heads=1)).head_ranks() == (3,)
    assert LowRank(**factors(), ranks=(0, 1, 2)).head_ranks() == (0, 1, 2)
    assert LowRank(**factors()).max_rank == 3


def test_ranks_travel_with_their_heads() -> None:
    term = LowRank(**factors(), ranks=(2, 0, 3), split=1)
    chosen = term.select_heads([2, 0])
    assert isinstance(chosen, LowRank)
    assert chosen.ranks == (3, 2) and chosen.split == 1
    assert torch.equal(chosen.dense(4, 5), term.dense(4, 5)[[2, 0]])
    alone = term.select_heads([1])
    assert isinstance(alone, LowRank) and alone.ranks == (0,)


def test_one_shared_factor_serves_all_heads() -> None:
    own = factors(heads=1)
    keys = Maker(seed=1).numbers(3, 5, 3)
    term = LowRank(phi_q=own["phi_q"], phi_k=keys, ranks=(3, 1, 2))
    assert term.num_own_heads() == 3
    dense = term.dense(4, 5)
    for h, rank in enumerate((3, 1, 2)):
        phi_q, phi_k = own["phi_q"][0, :, :rank], keys[h, :, :rank]
        assert torch.equal(dense[h], (phi_q[:, None] * phi_k[None]).sum(-1))


def test_a_row_scale_multiplies_rows_in_float64_too() -> None:
    own = factors()
    gate = torch.tensor([[1.0, 0.0, -2.0, 0.1]])
    plain = LowRank(**own).dense(4, 5, dtype=torch.float64)
    gated = LowRank(**own, row_scale=gate).dense(4, 5, dtype=torch.float64)
    assert gated.dtype == torch.float64
    for i in range(4):
        assert torch.equal(gated[:, i], float(gate[0, i]) * plain[:, i])


def test_batch_dimensions_of_the_factors_broadcast() -> None:
    x = Maker()
    term = LowRank(phi_q=x.numbers(2, 1, 3, 4, 2), phi_k=x.numbers(3, 1, 5, 2))
    assert term.batch_shape() == (2, 3)
    dense = term.dense(4, 5)
    assert dense.shape == (2, 3, 3, 4, 5)
    one = LowRank(phi_q=term.phi_q[1, 0], phi_k=term.phi_k[2])
    assert torch.equal(dense[1, 2], one.dense(4, 5))


def test_factors_stay_fp32() -> None:
    half = LowRank(**factors()).to(dtype=torch.float16)
    assert half.phi_q.dtype == half.phi_k.dtype == torch.float32


def test_what_does_not_fit_is_refused_by_name() -> None:
    own = factors()
    with pytest.raises(ValueError, match="phi_q must have shape"):
        LowRank(phi_q=own["phi_q"][0], phi_k=own["phi_k"])
    with pytest.raises(ValueError, match="phi_k must have shape"):
        LowRank(phi_q=own["phi_q"], phi_k=own["phi_k"][0])
    with pytest.raises(ValueError, match="must have the same rank, got 3 and 2"):
        LowRank(phi_q=own["phi_q"], phi_k=own["phi_k"][..., :2])
    with pytest.raises(ValueError, match="low_rank: tensors disagree on the number of heads"):
        LowRank(phi_q=own["phi_q"], phi_k=own["phi_k"][:2], ranks=(1, 1, 1))
    for ranks in ((1, 2), (1, 2, 4), (1, 2, -1), (1, 2, 3, 3)):
        with pytest.raises(ValueError, match="ranks must be 3 numbers from 0 to 3"):
            LowRank(**own, ranks=ranks)
    with pytest.raises(ValueError, match="low_rank: phi_q is for 4 queries, the call has 5"):
        LowRank(**own).dense(5, 5)
    with pytest.raises(ValueError, match="low_rank: phi_k is for 5 keys, the call has 4"):
        LowRank(**own).dense(4, 4)
