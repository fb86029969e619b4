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
    monkeypatch.setattr(script, "CACHED", 4 * 4096 * 4)


def test_exponentials() -> None:
    found = script.exponentials(2, DEVICE)
    expected = torch.arange(2 * 4096, dtype=torch.float64) * 1e-9
    for _ in range(3):
        expected = torch.exp2(-expected)
    assert torch.allclose(found.cpu().double(), expected, rtol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter takes bf16 for raw bits")
def test_products() -> None:
    assert bool((script.products(2, DEVICE) == 3 * script.TILE).all())


def test_reads() -> None:
    """Ones, three times: an odd number of them is left."""
    assert bool((script.reads(2, DEVICE) == 1).all())


@pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no card")
def test_a_card_is_measured() -> None:
    rates = script.measure(DEVICE)
    assert rates.memory < rates.cached and rates.exponentials < rates.products
