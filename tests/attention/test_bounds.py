"""Scores whose size is known: the kernel then needs no running maximum."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flashbias_convert import KeyBias, Regions
from flashbias_convert.attention import bias_bound, flashbias_attention, operator
from tests.support import assert_parity

from .cases import Inputs, plain_of, truth_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["low_rank", "table", "dense"])
def test_a_bound_is_a_bound_and_close(kind: str) -> None:
    x = Inputs(CPU, n=30, m=50, heads=3)
    term = getattr(x, kind)()
    bound, largest = bias_bound(x.bias(term)), float(term.dense(30, 50).abs().max())
    assert bound is not None and largest <= bound <= 1.5 * largest


def test_large_products_are_bounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs(CPU, n=30, heads=3)
    bias = x.bias(x.low_rank(ranks=(1, 5, 3)), x.table())
    whole = bias_bound(bias)
    monkeypatch.setattr("flashbias_convert.attention.bounds._PIECE", 400)
    assert bias_bound(bias) == pytest.approx(whole)


def test_masks_do_not_count_and_unknown_terms_have_no_bound() -> None:
    x = Inputs(CPU)
    ids = x.integers(3, 40)
    assert bias_bound(x.bias(Regions(ids=ids))) == 0
    assert bias_bound(x.bias(Regions(ids=ids, value=-3.0))) == 3
    # keys of other regions only: every key of a query may be hidden
    assert bias_bound(x.bias(Regions(ids=ids, key_ids=ids))) == 100
    assert bias_bound(x.bias(KeyBias(values=torch.zeros(2, 40)))) is None
    gated = dataclasses.replace(x.table(), row_scale=torch.ones(2, 40))
    assert bias_bound(x.bias(gated)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "m"), [(33, 47), (64, 64), (1, 5)])
def test_values(
    n: int, m: int, dtype: torch.dtype, kernel: str, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Small scores, because fp16 has few exponents; it is not used for fp16 otherwise."""
    monkeypatch.setattr(operator, "_is_bounded", lambda *_: True)
    x = Inputs(device, dtype, n=n, m=m, d=24, heads=3)
    bias = x.bias(x.low_rank(2, ranks=(1, 2, 2)), x.regions())
    options = {"cosine": True, "scale": 4.0}
    out = flashbias_attention(x.q, x.k, x.v, bias, backend=kernel, **options)
    assert_parity(out, plain_of(x, bias, **options), truth_of(x, bias, **options))


@pytest.mark.parametrize("bound", [10.0, 41.5])
def test_values_at_the_edge(bound: float, device: torch.device) -> None:
    """Scores from -bound to bound in bfloat16, and values that are tiny."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA card: bfloat16 in the kernel")
    x = Inputs(device, torch.bfloat16, n=100, d=32, heads=2)
    x.v *= 1e-8
    bias = x.bias(dataclasses.replace(x.dense(), bias=x.dense().bias.clamp(-5, 5)))
    options = {"cosine": True, "scale": bound - 5}
    assert operator._is_bounded(bound, torch.bfloat16, None)
    out = flashbias_attention(x.q, x.k, x.v, bias, backend="triton", score_bound=bound, **options)
    assert_parity(out, plain_of(x, bias, **options), truth_of(x, bias, **options))


def test_when_a_bound_is_used() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    assert operator._is_bounded(5.0, torch.bfloat16, None)
    assert not operator._is_bounded(None, torch.bfloat16, None)
    assert not operator._is_bounded(math.nan, torch.bfloat16, None)
    assert not operator._is_bounded(42.0, torch.bfloat16, None)
    assert not operator._is_bounded(5.0, torch.float16, None)
    assert not operator._is_bounded(5.0, torch.bfloat16, mask)
