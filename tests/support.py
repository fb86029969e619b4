"""Helpers for tests; nothing here uses the package under test."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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


#: (plain, truth) of the same computation at inputs or weights nearby, by a number from 1 on
Nearby = Callable[[int], tuple[Tensor, Tensor]]
#: how many of them are asked for
DRAWS = 8


def assert_parity(
    actual: Tensor,
    plain: Tensor,
    truth: Tensor,
    factor: float = 2.0,
    nearby: Nearby | None = None,
) -> None:
    """Assert that `actual` is about as close to the truth as a plain computation is.

    Both the largest and the root mean square error of `actual` may be at most `factor` times
    those of `plain`, plus one unit in the last place of the largest true value in the dtype of
    `actual`. The tolerance is derived from the data; there is none to tune.

    Rounding errors are a matter of chance, and of a whole model so is their size: a few places,
    where norms and sharp softmaxes magnify what comes in, decide about all of it. One draw says
    little then. Before this fails, the plain error is taken from more of them.

    Args:
        actual: the result under test.
        plain: the same quantity, computed by the original in the dtype of `actual`.
        truth: the same quantity in float64.
        factor: how much worse than `plain` the result may be.
        nearby: for whole models; see there.

    Raises:
        AssertionError: too far off, shapes that differ, or a value that is not finite in any of
            the tensors: NaN compares false with everything and must not pass for agreement.
    """
    assert actual.shape == plain.shape == truth.shape, "the shapes differ"
    assert truth.dtype == torch.float64, "the truth must be float64"
    assert plain.dtype == actual.dtype, "plain must have the dtype of actual"
    for name, value in (("truth", truth), ("plain", plain), ("actual", actual)):
        assert value.isfinite().all(), f"{name} has values that are not finite"
    ulp = torch.finfo(actual.dtype).eps * float(truth.abs().max())
    for norm in (_largest, _root_mean_square):
        got, reference = norm(actual.double() - truth), norm(plain.double() - truth)
        draws = 1
        while nearby is not None and got > factor * reference + ulp and draws <= DRAWS:
            another, its_truth = nearby(draws)
            assert another.dtype == plain.dtype and its_truth.dtype == torch.float64
            assert another.isfinite().all(), "plain has values nearby that are not finite"
            reference, draws = max(reference, norm(another.double() - its_truth)), draws + 1
        allowed = factor * reference + ulp
        assert got <= allowed, (
            f"{norm.__name__.strip('_')} error {got:.3g} exceeds {allowed:.3g} "
            f"(plain error {reference:.3g} in {draws} draws, one ulp {ulp:.3g})"
        )


def nudged(model: nn.Module, seed: int) -> Any:
    """A copy with every parameter changed by a unit in its last place, or not, at random."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                step = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + step.to(parameter) * torch.finfo(parameter.dtype).eps)
    return twin


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
