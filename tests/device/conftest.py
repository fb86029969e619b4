"""The devices that these tests run on.

The CPU always, a CUDA card where there is one. FLASHBIAS_DEVICE=card runs them on a device that
only pretends to be another one than the CPU, and fails where tensors of both meet (`card.py`).
"""

from __future__ import annotations

import os

import pytest
import torch

PRETEND = os.environ.get("FLASHBIAS_DEVICE") == "card"

if PRETEND:
    from . import card

    card.install()

_CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    ],
)


@pytest.fixture(params=["card"] if PRETEND else ["cpu", _CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where models and inputs are, with an index where there is one."""
    if request.param == "cuda":  # rounding as of the dtype, in convolutions, too
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.empty(0, device=str(request.param)).device
