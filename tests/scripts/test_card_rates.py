"""Kernels that do one thing do it as often as is counted, in Triton's interpreter or on a card."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import card_rates as script

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "STEPS", 3)


def test_exponentials() -> None:
    found = script.exponentials(2, DEVICE)
    expected = torch.arange(2 * 4096, dtype=torch.float64) * 1e-9
    for _ in range(3):
        expected = torch.exp2(-expected)
    assert torch.allclose(found.cpu().double(), expected, rtol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter takes bf16 for raw bits")
def test_products() -> None:
    ones = torch.ones(2 * script.TILE, script.TILE, device=DEVICE, dtype=torch.bfloat16)
    assert bool((script.products(ones, 2) == 3 * script.TILE).all())


def test_reads() -> None:
    """The first program has the first block, then the third and the first again."""
    block = script.BLOCK_BYTES // 4
    numbers = torch.tensor([1, 2, 4, 8], dtype=torch.int32, device=DEVICE).repeat_interleave(block)
    found = script.reads(numbers, 2, 3).reshape(2, block)
    assert bool((found[0] == 4).all()) and bool((found[1] == 8).all())


@pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no card")
def test_a_card_is_measured() -> None:
    rates = script.measure(DEVICE)
    assert rates.memory < rates.cached and rates.exponentials < rates.products
