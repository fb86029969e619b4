"""Learnable biases: what they add, that gradients reach them, and what size they take."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import ScoreBias, flashbias_attention
from flashbias_convert.decompose import row_center
from flashbias_convert.errors import UsageError
from flashbias_convert.nn import (
    AlibiBias,
    LearnableBias,
    LowRankBias,
    RelativeTableBias,
    SpatialDistanceBias,
    distance_factors,
)
from tests.memory import LargestTensor

HEADS, N, M, D = 2, 6, 6, 4


def points(count: int = N, seed: int = 3) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def low_rank() -> LowRankBias:
    module = LowRankBias(HEADS, N, M, 2)
    nn.init.normal_(module.phi_k)
    return module


def table() -> RelativeTableBias:
    module = RelativeTableBias(HEADS, (2, 3))
    nn.init.normal_(module.table)
    return module


#: modules for N queries and M keys, and the arguments of their calls
MODULES: dict[str, tuple[Callable[[], LearnableBias], Callable[[], tuple[Any, ...]]]] = {
    "low rank": (low_rank, tuple),
    "alibi": (lambda: AlibiBias(HEADS, learnable=True), tuple),
    "alibi, symmetric": (lambda: AlibiBias(HEADS, learnable=True, symmetric=True), tuple),
    "distance": (lambda: SpatialDistanceBias(HEADS, narrowest=2.0), lambda: (points(),)),
    "distance, by token": (lambda: SpatialDistanceBias(HEADS, tokens=N), lambda: (points(),)),
    "table": (table, tuple),
}


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    make, arguments = MODULES[name]
    module = make().double()
    call = tuple(map(wide, arguments()))
    names = [key for key, _ in module.named_parameters()]
    assert names
    q, k, v = (torch.randn(2, HEADS, N, D, dtype=torch.float64).requires_grad_() for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        own = dict(zip(names, parameters, strict=True))
        bias: Any = torch.func.functional_call(module, own, call)
        return flashbias_attention(q, k, v, bias, causal=True, backend="eager")

    inputs = (q, k, v, *(p.detach().requires_grad_() for p in module.parameters()))
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("name_of_backend", ["eager", "sdpa"])
def test_a_step_of_training_moves_every_parameter(name: str, name_of_backend: str) -> None:
    torch.manual_seed(0)
    make, arguments = MODULES[name]
    module = make()
    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    q, k, v = torch.randn(3, 2, HEADS, N, D).unbind(0)
    out = flashbias_attention(q, k, v, module(*arguments()), backend=name_of_backend)
    out.square().sum().backward()
    optimizer.step()
    for key, _ in module.named_parameters():
        assert not torch.equal(module.state_dict()[key], before[key]), key
    other = make()
    other.load_state_dict(module.state_dict())
    found, expected = (m(*arguments()).dense(N, M) for m in (other, module))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", MODULES)
def test_half_precision_rounds_no_parameter(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name][0]()
    before = copy.deepcopy(module.state_dict())
    for cast in (module.half, module.bfloat16):
        for key, value in cast().state_dict().items():
            assert value.dtype == torch.float32 and torch.equal(value, before[key])
    assert {p.dtype for p in module.double().parameters()} == {torch.float64}


def test_a_low_rank_bias_starts_as_none_and_learns() -> None:
    torch.manual_seed(0)
    module = LowRankBias(HEADS, 5, 7, 3)
    assert not module().dense(5, 7).any()
    length = module.phi_q.square().sum(-1).mean()
    assert 0.3 < length < 3
    assert repr(module) == "LowRankBias(heads=2, n=5, m=7, rank=3)"


def test_alibi_is_the_slope_times_the_distance() -> None:
    module = AlibiBias(4)
    assert not list(module.parameters()) and "slopes" in module.state_dict()
    distance = torch.arange(5.0) - torch.arange(5.0)[:, None]
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])[:, None, None]
    assert torch.equal(module().dense(5, 5), slopes * distance)
    symmetric = AlibiBias(4, symmetric=True)
    assert torch.equal(symmetric().dense(5, 5), -slopes * distance.abs())
    places = torch.tensor([3, 9])
    placed = module(pos_q=places, pos_k=places).dense(2, 2)
    assert torch.equal(placed[:, 0, 1], 6 * slopes.flatten())


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    return (x.double()[..., :, None, :] - y.double()[..., None, :, :]).square().sum(-1)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_distances_are_exact_up_to_a_constant_per_row(offset: float) -> None:
    x, y = points(9) + offset, points(7, seed=4) + offset
    module = SpatialDistanceBias(HEADS, tokens=9)
    with torch.no_grad():
        module.log_weight.copy_(torch.linspace(-1, 2, 18).reshape(2, 9))
    squares = squared_distances(x, y)
    truth = row_center(-module.log_weight.double().exp()[..., None] * squares)
    found = row_center(module(x, y).dense(9, 7, dtype=torch.float64))
    # factors are rounded to fp32, four products of them are summed
    allowed = (
        8
        * torch.finfo(torch.float32).eps
        * float(module.log_weight.detach().exp().max() * squares.max())
    )
    assert torch.allclose(found, truth, rtol=0, atol=allowed)
    assert not torch.allclose(found, 1.01 * truth, rtol=0, atol=allowed)


def test_where_weights_learn_nothing_is_left_out() -> None:
    x, y = points(9), points(7, seed=4)
    module = SpatialDistanceBias(HEADS, tokens=9)
    truth = -module.log_weight.detach().double().exp()[..., None] * squared_distances(x, y)
    found = module(x, y)
    assert found.terms[0].max_rank == 5
    assert torch.allclose(found.dense(9, 7, dtype=torch.float64), truth, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert module(x, y).terms[0].max_rank == 4  # softmax ignores what is left out
    module.requires_grad_(False)
    assert module(x, y).terms[0].max_rank == 4
    assert module(x.requires_grad_(), y).terms[0].max_rank == 5  # points learn, too


def test_weights_of_a_call_multiply_those_of_the_module() -> None:
    x = points()
    module = SpatialDistanceBias(HEADS, widest=2.0, narrowest=3.0, learnable=False)
    assert not list(module.parameters()) and "log_weight" in module.state_dict()
    weight = torch.rand(5, HEADS, N) + 0.5
    found = row_center(module(x.expand(5, N, 3), weight=weight).dense(N, N, dtype=torch.float64))
    both = weight * torch.tensor([2.0, 3.0])[:, None]
    truth = row_center(-both[..., None].double() * squared_distances(x, x))
    assert torch.allclose(found, truth, rtol=1e-5, atol=1e-5)


def test_a_table_has_a_number_for_every_offset() -> None:
    module = RelativeTableBias(1, (2, 3, 2))
    assert module.table.shape == (1, 3 * 5 * 3) and not module.table.any()
    with torch.no_grad():
        module.table.copy_(torch.arange(45.0))
    dense = module().dense(12, 12)[0]
    cells = list(itertools.product(range(2), range(3), range(2)))
    seen: dict[tuple[int, ...], float] = {}
    for (i, a), (j, b) in itertools.product(enumerate(cells), repeat=2):
        offset = tuple(p - q for p, q in zip(a, b, strict=True))
        assert seen.setdefault(offset, float(dense[i, j])) == float(dense[i, j])
    assert len(set(seen.values())) == len(seen) == 45
    assert set(module.state_dict()) == {"table"}


def test_a_table_of_a_sequence() -> None:
    module = RelativeTableBias(2, (4,))
    with torch.no_grad():
        module.table.copy_(torch.randn(2, 7))
    i = torch.arange(4)
    assert torch.equal(module().dense(4, 4), module.table.detach()[:, i[:, None] - i + 3])


def test_nothing_of_quadratic_size_is_made() -> None:
    n = 300
    x = points(n)
    modules = [LowRankBias(HEADS, n, n, 4), SpatialDistanceBias(HEADS, tokens=n)]
    q, k, v = torch.randn(3, HEADS, n, 8).requires_grad_().unbind(0)
    with LargestTensor() as largest:
        bias = ScoreBias(modules[0]().terms + modules[1](x).terms, HEADS)
        flashbias_attention(q, k, v, bias, backend="sdpa").square().sum().backward()
    assert modules[1].log_weight.grad is not None
    assert HEADS * n * 8 <= largest.elements < n * n
    with LargestTensor() as largest:
        flashbias_attention(q, k, v, bias, backend="eager")
    assert largest.elements >= n * n


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: LowRankBias(0, 4, 4, 2), "heads must be a positive integer"),
        (lambda: LowRankBias(1, 4, 4, 0), "rank must be"),
        (lambda: AlibiBias(3, convention="no"), "convention"),  # type: ignore[arg-type]
        (lambda: RelativeTableBias(1, ()), "at least one size"),
        (lambda: RelativeTableBias(1, (3, 0)), "size of window"),
        (lambda: SpatialDistanceBias(1, tokens=0), "tokens must be"),
        (lambda: SpatialDistanceBias(1, widest=0.0), "weights must be positive"),
        (lambda: distance_factors(points(), points()[:, :2]), "dimension"),
    ],
)
def test_sizes_that_make_no_sense(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make()


def test_points_in_half_precision_are_refused() -> None:
    with pytest.raises(TypeError, match="fp32 or fp64"):
        SpatialDistanceBias(1)(points().half())
