"""Helpers for tests; nothing here uses the package under test."""

from __future__ import annotations

import torch
from torch import Tensor


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
