"""Helpers for tests; nothing here uses the package under test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64Throughout(TorchFunctionMode):
    """Inside, a double model stays in float64 where its library takes scores to float32.

    Some do so before a softmax, whatever the dtype of the model. That is no truth: scores with a
    bias of some hundreds lose more there than the attention under test may.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (F.softmax, torch.softmax, Tensor.softmax):
                options.pop("dtype", None)
        return func(*args, **options)


def assert_parity(actual: Tensor, plain: Tensor, truth: Tensor, factor: float = 2.0) -> None:
    """Assert that `actual` is about as close to the truth as a plain computation is.

    Both the largest and the root mean square error of `actual` may be at most `factor` times
    those of `plain`, plus one unit in the last place of the largest true value in the dtype of
    `actual`. The tolerance is derived from the data; there is none to tune.

    Args:
        actual: the result under test.
        plain: the same quantity, computed by the original in the dtype of `actual`.
        truth: the same quantity in float64.
        factor: how much worse than `plain` the result may be.

    Raises:
        AssertionError: too far off, shapes that differ, or a value that is not finite in any of
            the three: NaN compares false with everything and must not pass for agreement.
    """
    assert actual.shape == plain.shape == truth.shape, "the shapes differ"
    assert truth.dtype == torch.float64, "the truth must be float64"
    assert plain.dtype == actual.dtype, "plain must have the dtype of actual"
    for name, value in (("truth", truth), ("plain", plain), ("actual", actual)):
        assert value.isfinite().all(), f"{name} has values that are not finite"
    ulp = torch.finfo(actual.dtype).eps * float(truth.abs().max())
    for norm in (_largest, _root_mean_square):
        got, reference = norm(actual.double() - truth), norm(plain.double() - truth)
        allowed = factor * reference + ulp
        assert got <= allowed, (
            f"{norm.__name__.strip('_')} error {got:.3g} exceeds {allowed:.3g} "
            f"(plain error {reference:.3g}, one ulp {ulp:.3g})"
        )


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
