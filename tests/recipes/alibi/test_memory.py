"""Language models with ALiBi: nothing of quadratic size is made around the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import unpatch_model
from flashbias_convert.modules import ScoreBiasModule

from ..model_parity import NoSquares
from .models import make, padding, patch, tokens

pytest.importorskip("transformers")


@pytest.fixture
def attention_without_scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backends that run on a CPU do make scores; the kernel does not."""

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        assert kwargs["causal"]
        return q.clone()

    monkeypatch.setattr(ScoreBiasModule, "forward", forward)
    yield


@pytest.mark.usefixtures("attention_without_scores")
@pytest.mark.parametrize("padded", [False, True])
def test_nothing_of_quadratic_size_is_made_around_the_kernel(name: str, padded: bool) -> None:
    n = 1500
    model, ids = patch(make(name)), tokens(1, n)
    mask = padding(2, n)[:1] if padded else None
    with NoSquares(n), torch.no_grad():
        model.get_decoder()(ids, attention_mask=mask)
    unpatch_model(model)
    with pytest.raises(AssertionError, match="makes"), NoSquares(n), torch.no_grad():
        model.get_decoder()(ids, attention_mask=mask)
