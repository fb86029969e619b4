"""The operator itself where tensors are."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert import ScoreBias
from flashbias_convert.attention import flashbias_attention


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_bias_without_terms_has_no_device(backend: str, device: torch.device) -> None:
    q = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0)).to(device)
    none = flashbias_attention(q, q, q, backend=backend)
    empty = flashbias_attention(q, q, q, ScoreBias((), 2), backend=backend)
    assert empty.device == device
    assert torch.equal(empty.cpu(), none.cpu())
