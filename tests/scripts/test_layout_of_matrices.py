"""Dense matrices of peers that are patched by hand: laid out so that fused kernels take them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/paper"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_models
import pairformer_ways
from whole_models import hand
from whole_models.case import FLEX, SDPA, SDPA_CUDNN

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
READ_BY_KERNELS = [
    (key, way)
    for key, case in bench_models.all_cases(True).items()
    for way in (SDPA, SDPA_CUDNN, FLEX)
    if way in case.ways
]


@pytest.mark.parametrize(("key", "way"), READ_BY_KERNELS)
def test_matrices_are_laid_out_as_fused_kernels_want_them(
    key: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(bias)
        return torch.zeros_like(v[..., : q.shape[-2], :])

    monkeypatch.setattr(hand.peers, "_flex", attend)
    monkeypatch.setattr(hand.F, "scaled_dot_product_attention", attend)
    ready = bench_models.all_cases(True)[key].prepare(way, CPU, torch.bfloat16)
    with torch.no_grad():
        ready.model(*ready.args, **ready.kwargs)
    assert seen
    for bias in seen:
        assert_taken_as_it_is(bias)


@pytest.mark.parametrize("n", [32, 33])
def test_biases_of_pairs_are_laid_out_as_fused_kernels_want_them(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        seen.append(bias)
        return torch.zeros_like(q)

    monkeypatch.setattr(pairformer_ways.F, "scaled_dot_product_attention", attend)
    x = torch.zeros(3, 4, n, 8, dtype=torch.bfloat16)
    projected = torch.randn(n, n, 4).to(torch.bfloat16).permute(2, 0, 1)
    pairformer_ways.sdpa(pairformer_ways.Call(x, x, x, lambda: projected))
    (bias,) = seen
    assert torch.equal(bias[0], projected) and bias.stride(0) == 0
    assert_taken_as_it_is(bias)


def assert_taken_as_it_is(bias: Tensor) -> None:
    """Neighbours lie beside each other, rows are aligned."""
    assert bias.stride(-1) == 1
    # where there is one of something, its stride says nothing
    others = zip(bias.stride()[:-1], bias.shape[:-1], strict=True)
    assert all(stride % 16 == 0 for stride, n in others if n > 1)
    assert bias.dtype == torch.bfloat16 and bias.data_ptr() % 16 == 0
