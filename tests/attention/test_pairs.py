"""Tables of windows of an even width: entries of two keys by one read, in units of the scores."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashbias_convert import RelativeTable
from flashbias_convert.attention import flashbias_attention
from flashbias_convert.attention.packing import join, pack

from .cases import Inputs, check

#: rows and columns of a window: a tile and a bit, fewer keys than a tile, one row
WINDOWS = [(9, 8), (3, 6), (1, 70), (12, 12)]
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "negative": {"scale": -0.7},
    "tiny scale": {"scale": 1e-6},
    "cosine": {"cosine": True, "scale": 8.0},
    "causal": {"causal": True, "cosine": True, "scale": 8.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(
    window: tuple[int, int], options: str, kernel: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, n=window[0] * window[1], d=24, heads=3)
    term = x.pairs(window[1])
    assert term.pairs
    check(x, x.bias(term), kernel, **OPTIONS[options])


def test_a_scale_that_is_rounded_up_to_what_is_divided_by(
    kernel: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Just below 2**-8 in fp64, and 2**-8 in the kernel."""
    x = Inputs(device, dtype, n=24, heads=2)
    for terms in ([x.table()], [x.low_rank(3)]):
        for cut in (2.0**-25, 2.0**-24, 1e-9):
            check(x, x.bias(*terms), kernel, scale=2.0**-8 * (1 - cut))


@pytest.mark.parametrize("cosine", [False, True])
def test_windows_with_all_else(
    cosine: bool, kernel: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Types of windows, gates of rows, factors, shift masks, hidden keys and scales by head."""
    x = Inputs(device, dtype, batch=(2, 3), n=48, heads=3)
    term = x.rows(x.pairs(8, batch=(3,)))
    mask = x.integers(4, 2, 3, x.m) > 0
    scale = torch.tensor([0.5, 3.0, 20.0 if cosine else -1.0], device=device)
    bias = x.bias(term, x.low_rank(3), x.regions((3,)))
    check(x, bias, kernel, key_mask=mask, scale=scale, cosine=cosine)


@pytest.mark.parametrize("cosine", [False, True])
def test_both_ways_of_reading_give_the_same_bits(
    cosine: bool, kernel: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, n=80, heads=2)
    term = x.pairs(10)
    one, other = (
        flashbias_attention(x.q, x.k, x.v, x.bias(own), backend=kernel, cosine=cosine)
        for own in (term, dataclasses.replace(term, pairs=False))
    )
    assert torch.equal(one, other)


def test_few_queries_of_many_keys(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    """Programs that share the keys of a row."""
    x = Inputs(device, dtype, n=2, m=300, heads=2)
    codes = torch.arange(x.m, device=device)
    term = RelativeTable.of_codes(x.normal(2, x.m + 1), codes[: x.n], codes.flip(0))
    assert term.pairs
    check(x, x.bias(term), kernel)


@pytest.mark.parametrize("scale", [1e4, 1e5, 1e9])
def test_cosines_by_a_huge_scale(
    scale: float, kernel: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Beyond what fp16 holds, as normalised rows are: a query's own key takes all of the weight."""
    x = Inputs(device, dtype, batch=(1,), n=16, d=16, heads=1)
    x.q = x.k = torch.eye(16, device=device, dtype=dtype)[None, None]
    out = flashbias_attention(x.q, x.k, x.v, cosine=True, scale=scale, backend=kernel)
    torch.testing.assert_close(out, x.v)


@pytest.mark.parametrize("half", [False, True])
def test_training_reads_the_table_as_it_is(half: bool, kernel: str, device: torch.device) -> None:
    """Gradients are those of the table, not of what inference is given."""
    x = Inputs(device, torch.float16 if half else torch.float32, n=24, heads=2)
    close = {"rtol": 0.05, "atol": 0.02} if half else {"rtol": 1e-4, "atol": 1e-4}
    term = x.pairs(6)
    for own in (term, dataclasses.replace(term, pairs=False)):
        table = own.table.clone().requires_grad_()
        bias = x.bias(dataclasses.replace(own, table=table))
        out = flashbias_attention(x.q, x.k, x.v, bias, backend=kernel, cosine=True, scale=5.0)
        out.square().sum().backward()
        truth = own.table.double().requires_grad_()
        right = x.bias(dataclasses.replace(own, table=truth))
        wide = (each.double() for each in (x.q, x.k, x.v))
        exact = flashbias_attention(*wide, right, backend="eager", cosine=True, scale=5.0)
        exact.square().sum().backward()
        assert table.grad is not None and truth.grad is not None
        assert torch.allclose(table.grad.double(), truth.grad, **close)


def test_what_is_packed() -> None:
    x = Inputs(torch.device("cpu"), n=24, heads=2)
    term = x.pairs(6)
    (group,) = pack(x.bias(term), half=True, scale=0.5).groups
    assert group.pairs and group.divided
    packed = pack(x.bias(term), half=False)
    assert packed.groups[0].pairs and not packed.groups[0].divided
    own = dict(zip(packed.groups[0].tensors, packed.tensors, strict=True))["table"]
    assert torch.equal(own[:, ::2], term.table) and torch.equal(own[:, 3::2], term.table[:, :-1])
    # terms that join for a call are not packed for pairs
    (joined,) = join(pack(x.bias(x.low_rank(2)), half=True, scale=0.5), [term]).groups
    assert not joined.pairs and not joined.divided
