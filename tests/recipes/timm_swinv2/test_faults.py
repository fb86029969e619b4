"""The comparison notices what goes wrong in a patched forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from flashbias_convert import masks as masks_module
from tests.support import assert_parity

from .models import check_model, image, make, patch, run, true_output


def drop_mask(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q, k, v, None, kw


def wrong_scale(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q, k, v, mask, {**kw, "scale": kw["scale"] * 1.001}


def no_cosine(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q, k, v, mask, {**kw, "cosine": False}


def swapped(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return k, q, v, mask, kw


@pytest.mark.parametrize("fault", [drop_mask, wrong_scale, no_cosine, swapped])
def test_a_broken_forward_fails_the_comparison(
    fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = masks_module.attend_windows

    def broken(terms: Any, *args: Any, **kwargs: Any) -> Tensor:
        *changed, keywords = fault(*args, **kwargs)
        return right(terms, *changed, **keywords)

    monkeypatch.setattr("flashbias_convert.recipes.timm_swinv2.attend_windows", broken)
    with pytest.raises(AssertionError, match="error"):
        check_model(make(), image())


def test_a_missing_bias_fails_the_comparison() -> None:
    model = make()
    plain, truth = run(model, image()), true_output(model, image())
    patch(model)
    for name, buffer in model.named_buffers():
        if name.endswith("relative_table.table"):
            buffer.zero_()
    with pytest.raises(AssertionError, match="error"):
        assert_parity(run(model, image()), plain, truth)
