"""The PDE solver: exact distances, linear memory, and precision that autocast does not touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert.errors import UsageError
from flashbias_convert.models.pde_transformer import (
    Attend,
    Distances,
    FusedAttend,
    PDEConfig,
    PDETransformer,
    relative_error,
)
from tests.memory import LargestTensor
from tests.support import assert_parity

SMALL = PDEConfig(inputs=2, layers=2, channels=16, heads=4, feedforward=24, narrowest=8.0)


def points(n: int = 37, batch: int = 2, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, n, 3, generator=generator) + offset


def values(n: int = 37, batch: int = 2) -> Tensor:
    return torch.randn(batch, n, 2, generator=torch.Generator().manual_seed(1))


def make(config: PDEConfig = SMALL, backend: str = "sdpa") -> PDETransformer:
    torch.manual_seed(2)
    model = PDETransformer(config, FusedAttend(backend))
    for layer in model.layers:
        if layer.attention.weight is not None:  # weights that differ from token to token
            torch.nn.init.normal_(layer.attention.weight.weight, std=0.1)
    return model


def formula(q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D) - w |x_i - x_j|^2) v, with the whole matrix."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if weight is not None:
        x = distances.points
        squares = (x[:, :, None] - x[:, None]).square().sum(-1)
        scores = scores - weight[..., None] * squares[:, None]
    return scores.softmax(-1) @ v


def run(model: PDETransformer, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of all parameters, as one vector each."""
    out = model(points().to(dtype), values().to(dtype))
    grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    return out.detach(), [torch.cat([g.flatten() for g in grads])]


@pytest.mark.parametrize("distance", [True, False])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_it_is_the_formula_and_so_are_its_gradients(distance: bool, backend: str) -> None:
    config = PDEConfig(**{**vars(SMALL), "distance": distance})
    models = [make(config, backend), make(config), make(config).double()]
    for model in models[1:]:
        model.use(formula)
        for layer in model.layers:  # fp32 on purpose; the truth is wider
            if model is models[2] and layer.attention.weight is not None:
                weight = layer.attention.weight
                layer.attention.token_weights = (  # type: ignore[method-assign]
                    lambda x, w=weight: w(x).exp().transpose(-1, -2)
                )
    dtypes = (torch.float32, torch.float32, torch.float64)
    results = [run(model, dtype) for model, dtype in zip(models, dtypes, strict=True)]
    assert_parity(*(out for out, _ in results))
    assert_parity(*(grads[0] for _, grads in results))


def test_distances_matter_and_their_weights_learn() -> None:
    model = make()
    with_distances = model(points(), values())
    with_distances.square().sum().backward()
    for layer in model.layers:
        grads = [p.grad for p in layer.attention.weight.parameters()]
        assert all(grad is not None and grad.any() for grad in grads)
        with torch.no_grad():
            layer.attention.weight.bias.sub_(5.0)
    assert not torch.allclose(model(points(), values()), with_distances, atol=1e-3)


def test_a_model_starts_with_a_series_of_weights() -> None:
    model = PDETransformer(SMALL)
    weights = model.layers[0].attention.token_weights(torch.randn(1, 5, 16))
    assert torch.allclose(weights[0, :, 0], torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert PDETransformer().config == PDEConfig()
    paper = PDEConfig()
    sizes = (paper.layers, paper.channels, paper.heads, paper.feedforward)
    assert sizes == (8, 128, 8, 256)


def test_a_step_makes_nothing_of_quadratic_size() -> None:
    n = 700
    model = make()
    model(points(8), values(8))
    with LargestTensor() as largest:
        out = model(points(n, 1), values(n, 1))
        relative_error(out, torch.ones_like(out)).mean().backward()
    assert n * 24 <= largest.elements < n * n / 4
    model.use(formula)
    with LargestTensor() as largest:
        model(points(n, 1), values(n, 1))
    assert largest.elements >= n * n


def test_a_shift_of_all_points_changes_nothing_but_rounding() -> None:
    model = make()
    far = points(offset=64.0)
    near = far - 64.0  # coordinates that are exact in both places
    assert torch.allclose(model(near, values()), model(far, values()), atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 100.0, 1000.0, 5000.0])
def test_far_points_keep_their_distances(shift: float, dtype: torch.dtype, backend: str) -> None:
    """Squares that are summed out there lose a distance of 1/4 at 5000 in fp32, at 100 in fp16."""
    at = torch.tensor([[[0.0], [0.5], [1.0]]], dtype=torch.float64)
    distances = Distances.of((at + shift).float())
    squares = (at - at.mT).square()
    found = distances.bias(torch.ones(1, 1, 3)).dense(3, 3, dtype=torch.float64)
    assert torch.equal(found[0, 0], -squares[0])
    q, v = torch.zeros(1, 1, 3, 8, dtype=dtype), torch.eye(3, dtype=dtype)[None, None]
    out = FusedAttend(backend)(q, q, v, distances, torch.ones(1, 1, 3))
    # the weight and the sum that it is divided by are rounded
    allowed = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(out[0].double(), (-squares).softmax(-1), **allowed)


def test_autocast_rounds_no_weight_and_no_coordinate() -> None:
    model = make()
    seen: list[tuple[Tensor, ...]] = []

    def attend(
        q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Tensor | None
    ) -> Tensor:
        assert weight is not None
        seen.append((q, distances.points, distances.phi_q, distances.phi_k, weight))
        return FusedAttend("sdpa")(q, k, v, distances, weight)

    model.use(attend)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(points(), values())
    assert out.dtype == torch.bfloat16 and len(seen) == 2
    for q, *rest in seen:
        assert q.dtype == torch.bfloat16
        assert all(x.dtype == torch.float32 for x in rest)
        assert any(not torch.equal(x, x.bfloat16().float()) for x in rest)
    out.float().square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_half_precision_keeps_the_distances_of_split_factors() -> None:
    """Weights at which rounded factors would be off by more than one."""
    config = PDEConfig(**{**vars(SMALL), "widest": 100.0, "narrowest": 100.0})
    model = make(config)
    q, k, v = (x.bfloat16() for x in torch.randn(3, 2, 4, 37, 4).unbind(0))
    distances = Distances.of(points(offset=3.0))
    weight = model.layers[0].attention.token_weights(torch.randn(2, 37, 16))
    assert weight is not None
    plain = formula(*(x.float() for x in (q, k, v)), distances, weight).bfloat16()
    wide = Distances.of(points(offset=3.0).double())
    truth = formula(*(x.double() for x in (q, k, v)), wide, weight.double())
    found = FusedAttend("sdpa")(q, k, v, distances, weight)
    assert_parity(found.detach(), plain.detach(), truth.detach())


@pytest.mark.parametrize("largest", [64.0, 4000.0])
def test_half_precision_finds_the_gradients_of_weights(largest: float) -> None:
    """Of weights at which a point sees few others, beside numbers of the size of the whole set."""
    torch.manual_seed(3)
    at = torch.nn.functional.normalize(torch.randn(1, 200, 3), dim=-1)
    q, k, v, dout = torch.randn(4, 1, 2, 200, 16).bfloat16().unbind(0)
    weights = largest * torch.rand(1, 2, 200)

    def gradient(dtype: torch.dtype, attend: Attend) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        own = weights.to(wide).requires_grad_()
        inputs = (x.to(dtype) for x in (q, k, v))
        out = attend(*inputs, Distances.of(at.to(wide)), own)
        (found,) = torch.autograd.grad(out, own, dout.to(out.dtype))
        return found

    def plain(q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Any) -> Tensor:
        squares = (distances.points[:, :, None] - distances.points[:, None]).square().sum(-1)
        bias = -weight[..., None] * squares[:, None]
        return ((q @ k.mT) * q.shape[-1] ** -0.5 + bias.to(q.dtype)).softmax(-1) @ v

    found = gradient(torch.bfloat16, FusedAttend("sdpa"))
    formula_in_half = gradient(torch.bfloat16, plain)
    assert_parity(found, formula_in_half, gradient(torch.float64, formula))


def test_points_in_half_precision_are_refused() -> None:
    with pytest.raises(TypeError, match="fp32 or fp64"):
        make()(points().bfloat16(), values())


@pytest.mark.parametrize(
    "change, match",
    [
        ({"heads": 3}, "do not divide"),
        ({"layers": 0}, "layers must be positive"),
        ({"inputs": -1}, "inputs must be positive"),
        ({"narrowest": 0.0}, "weights must be positive"),
    ],
)
def test_sizes_that_make_no_sense(change: dict[str, float], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        PDEConfig(**change)  # type: ignore[arg-type]


def test_the_relative_error() -> None:
    truth = torch.tensor([[[3.0], [4.0]], [[1.0], [0.0]]])
    found = torch.tensor([[[3.0], [4.0]], [[1.0], [0.5]]])
    assert torch.equal(relative_error(found, truth), torch.tensor([0.0, 0.5]))


def test_half_precision_keeps_the_gradients_of_weights() -> None:
    """A part of the distance that softmax ignores must stay among the factors: rounded rows of the
    gradient of scores do not add up to nothing, and meet |x|^2 of the whole set."""
    torch.manual_seed(0)
    points = torch.rand(1, 200, 3) * 4
    distances = Distances.of(points)
    assert distances.phi_q.shape[-1] == 5
    q, k, v, dout = (torch.randn(1, 2, 200, 16) for _ in range(4))
    weight = torch.rand(1, 2, 200) * 8

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        own = weight.to(wide).requires_grad_()
        where = Distances.of(points.to(wide))
        attend = FusedAttend(backend=backend)
        attend(*(x.to(dtype) for x in (q, k, v)), where, own).backward(dout.to(dtype))
        assert own.grad is not None
        return own.grad.double()

    truth = gradient(torch.float64, "eager")
    away = (gradient(torch.bfloat16, "sdpa") - truth).norm() / truth.norm()
    assert away < 0.02


def test_double_precision_throughout() -> None:
    model = PDETransformer(PDEConfig(layers=1, channels=16, heads=2, feedforward=8)).double()
    out = model(torch.rand(1, 9, 3).double(), torch.rand(1, 9, 1).double())
    assert out.dtype == torch.float64 and out.isfinite().all()


@pytest.mark.parametrize("known", [None, 2])
def test_other_inputs_are_an_error(known: int | None) -> None:
    model = PDETransformer(PDEConfig(layers=1, channels=16, heads=2, feedforward=8))
    values = None if known is None else torch.rand(1, 9, known)
    with pytest.raises(UsageError, match="3 dimensions with 1 values each"):
        model(torch.rand(1, 9, 3), values)


def test_what_does_not_fit_is_refused_in_words() -> None:
    model = make()
    with pytest.raises(UsageError, match=r"\(B, N, d\), got \(37, 3\)"):
        model(points()[0], values())
    with pytest.raises(UsageError, match=r"float32 and the points torch.float64"):
        model(points().double(), values())
    with pytest.raises(UsageError, match=r"bfloat16 and the points torch.float32"):
        make().bfloat16()(points(), values())
    with pytest.raises(UsageError, match=r"heads must be an integer, got 8.0"):
        PDEConfig(heads=8.0)  # type: ignore[arg-type]
    assert make().double()(points().double(), values().double()).dtype == torch.float64
