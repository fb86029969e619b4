"""The kernels that write factors give what torch gives, bit for bit, in few operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashbias_convert import Dense, KeyBias, LowRank, ScoreBias
from flashbias_convert.attention import factor_columns as columns
from flashbias_convert.attention import factor_launch
from flashbias_convert.attention.factors import balance_step, column_tops
from flashbias_convert.attention.launch_plan import LaunchPlan
from flashbias_convert.attention.packing import pack
from flashbias_convert.attention.training_packing import (
    factor_gradients,
    pack_for_training,
    rounded,
)
from flashbias_convert.terms import constants

from .conftest import INTERPRETED

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Pair = tuple[Tensor, Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def uneven(*shape: int) -> Tensor:
    """Columns of very different sizes, one of them zero."""
    return normal(*shape) * torch.logspace(-9, 9, shape[-1]) * (torch.arange(shape[-1]) != 2)


def halfway(power: int) -> Tensor:
    """Columns whose largest entries are 2^power: quotients lie half-way between steps."""
    return torch.full((2, 4, 3), 2.0**power) * torch.tensor([1.0, -0.5, 0.125])


LAYOUTS: dict[str, Callable[[], Pair]] = {
    "plain": lambda: (normal(2, 3, 20, 5), normal(2, 3, 21, 5)),
    "keys-of-the-batch": lambda: (normal(2, 3, 20, 5), normal(1, 21, 5)),
    "queries-of-the-batch": lambda: (normal(3, 20, 5), normal(4, 2, 1, 21, 5)),
    "transposed": lambda: (normal(20, 2, 3, 17).movedim(0, 2), normal(3, 17, 21).mT),
    "wide-batch": lambda: (normal(2, 1, 2, 3, 3, 4, 5)[:, 0], normal(2, 2, 1, 3, 6, 5)),
    "too-many-dimensions": lambda: (normal(2, 1, 2, 2, 3, 4, 5), normal(3, 6, 5)),
    "half": lambda: (normal(3, 20, 16).half(), normal(3, 9, 16).half()),
    "mixed": lambda: (normal(3, 20, 16), normal(3, 9, 16).half()),
    "uneven": lambda: (uneven(3, 20, 16), uneven(3, 9, 16).flip(-1)),
    "zeros": lambda: (torch.zeros(3, 20, 5), normal(3, 9, 5)),
    "halfway-up": lambda: (halfway(0), halfway(5)),
    "halfway-down": lambda: (halfway(3), halfway(0)),
}
#: columns to split, dtype, and the scale by whose size phi_q is divided; "heads" for one each
ROUNDINGS: dict[str, tuple[int, torch.dtype, Any]] = {
    "split": (99, FP16, 72**-0.5),
    "some-split": (2, FP16, 1),
    "unsplit": (0, FP16, -0.17),
    "tiny-scale": (2, FP16, 1e-4),
    "undivided": (3, FP16, None),
    "heads": (2, FP16, "heads"),
    "fp32": (0, FP32, None),
}


def scale_of(named: Any, phi_q: Tensor) -> float | Tensor | None:
    if named != "heads":
        return named  # type: ignore[no-any-return]
    # one is so small that factors are not divided by it
    return torch.linspace(-1.3, 1e-4, phi_q.shape[-3], device=phi_q.device)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_write_the_bits_of_torch(
    kernel: str, device: torch.device, layout: str, rounding: str
) -> None:
    phi_q, phi_k = (phi.to(device) for phi in LAYOUTS[layout]())
    split, dtype, named = ROUNDINGS[rounding]
    split, scale = min(split, phi_q.shape[-1]), scale_of(named, phi_q)
    assert factor_launch.is_served(phi_q, phi_k) == (layout != "too-many-dimensions")
    made = columns.factor_columns(phi_q, phi_k, split, dtype, scale)
    expected = columns.columns_by_torch(phi_q, phi_k, split, dtype, scale)
    for own, other in zip(made, map(columns.padded_columns, expected), strict=True):
        assert own.dtype == other.dtype and own.is_contiguous()
        assert torch.equal(own, other)


@pytest.mark.parametrize("scale", [0.17, "heads"])
@pytest.mark.parametrize("names", [("phi_q", "phi_k"), ("phi_q",), ("phi_k",)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_in_two_dtypes(
    kernel: str, device: torch.device, layout: str, names: tuple[str, ...], scale: Any
) -> None:
    """Parts of both are made of the same numbers: the second ones have the bits of torch, too."""
    phi_q, phi_k = (phi.to(device) for phi in LAYOUTS[layout]())
    split, scale = min(3, phi_q.shape[-1]), scale_of(scale, phi_q)
    # Triton's interpreter cuts bits off where it should round to bf16
    others = {name: FP16 if INTERPRETED else BF16 for name in names}
    tops = column_tops(phi_q, phi_k)
    made = columns.columns_by_name(phi_q, phi_k, tops, split, FP32, scale, others)
    assert made.keys() == {"phi_q", "phi_k", *(f"{name}_rounded" for name in names)}
    for dtype, end in ((FP32, ""), (FP16 if INTERPRETED else BF16, "_rounded")):
        expected = columns.columns_by_torch(phi_q, phi_k, split, dtype, scale)
        padded = map(columns.padded_columns, expected)
        for name, other in zip(("phi_q", "phi_k"), padded, strict=True):
            if not end or name in names:
                assert torch.equal(made[f"{name}{end}"], other)


def test_parts_in_bf16_are_cut_of_whole_numbers(kernel: str, device: torch.device) -> None:
    """However the high part is rounded, the low one is what it leaves."""
    phi_q, phi_k = (normal(2, 3, n, 5).to(device) for n in (20, 21))
    others = {"phi_q": BF16, "phi_k": BF16}
    tops = column_tops(phi_q, phi_k)
    made = columns.columns_by_name(phi_q, phi_k, tops, 3, FP16, 0.17, others)
    step, scale = balance_step(*tops), 0.17
    for name, exact, low in (("phi_q", phi_q * step / scale, 2), ("phi_k", phi_k / step, 1)):
        triples = made[f"{name}_rounded"][..., :9].double().unflatten(-1, (3, 3))
        whole = triples[..., 0] + triples[..., low]
        assert torch.equal(triples[..., 3 - low], triples[..., 0])
        assert ((whole / exact[..., :3].double()) - 1).abs().max() < 2**-14
        rest = made[f"{name}_rounded"][..., 9:11].double()
        assert ((rest / exact[..., 3:].double()) - 1).abs().max() < 2**-7


def test_factors_that_are_balanced_already(kernel: str, device: torch.device) -> None:
    phi_q, phi_k = normal(3, 20, 5).to(device), 64 * normal(1, 9, 5).to(device)
    made = columns.factor_columns(phi_q, phi_k, 0, FP16, 0.3, balanced=True)
    expected = columns.columns_by_torch(phi_q, phi_k, 0, FP16, 0.3, balanced=True)
    for own, other in zip(made, map(columns.padded_columns, expected), strict=True):
        assert torch.equal(own, other)


def test_factors_of_a_transform(kernel: str, device: torch.device) -> None:
    """What torch.vmap gives has no memory of its own: torch does the work."""
    phi_q, phi_k = normal(2, 3, 20, 5).to(device), normal(2, 3, 9, 5).to(device)

    def pack_one(own_q: Tensor, own_k: Tensor) -> Pair:
        return columns.factor_columns(own_q, own_k, 2, FP16, 0.3)

    made = torch.vmap(pack_one)(phi_q, phi_k)
    each = [pack_one(*pair) for pair in zip(phi_q, phi_k, strict=True)]
    for own, expected in zip(made, zip(*each, strict=True), strict=True):
        assert torch.equal(own, torch.stack(expected))


@pytest.mark.parametrize("names", [("phi_q", "phi_k"), ("phi_q",), ("phi_k",)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_columns_have_the_bits_of_torch(
    kernel: str, device: torch.device, layout: str, names: tuple[str, ...]
) -> None:
    factors = [phi.to(device) for phi in LAYOUTS[layout]()]
    split = min(3, factors[0].shape[-1])
    of_columns = columns.factor_columns(factors[0], factors[1], split, FP16, 1.0)
    shapes = dict(zip(("phi_q", "phi_k"), (t.shape for t in of_columns), strict=True))
    found = {name: normal(*shapes[name]).to(device) for name in names}
    made = columns.column_gradients(factors[0], factors[1], split, found)
    expected = columns.gradients_by_torch(factors[0], factors[1], split, found)
    assert made.keys() == expected.keys() == set(names)
    assert all(torch.equal(made[name], expected[name]) for name in names)


@pytest.mark.parametrize("power", range(-6, 7))
def test_half_way_steps_are_even(power: int) -> None:
    """Powers of two, and their neighbours, whose fp32 logarithms are those of the powers."""
    top_q, top_k = torch.ones(1, 1, 3), torch.full((1, 1, 3), 2.0**power)
    top_k[..., 0] = top_k[..., 1].nextafter(torch.tensor(0.0))
    top_k[..., 2] = top_k[..., 1].nextafter(torch.tensor(torch.inf))
    below, above = 2.0 ** (power // 2), 2.0 ** -(-power // 2)
    even = below if (power // 2) % 2 == 0 else above
    assert balance_step(top_q, top_k).flatten().tolist() == [below, even, above]


# -- how many operations ---------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts what torch does, views included, and launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        if INTERPRETED:
            return
        # as on a card, but for what launches write; this mode is not to turn kernels off
        monkeypatch.setattr(factor_launch, "_INTERPRETED", True)
        for module in (factor_launch, constants):
            monkeypatch.setattr(module, "is_watched", lambda: False)
        monkeypatch.setattr(factor_launch, "_PLANS", {})
        monkeypatch.setattr(LaunchPlan, "_launch", lambda *_: self.found.update(["launch"]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def low_rank(dtype: torch.dtype = FP32, rank: int = 32, **fields: Any) -> LowRank:
    phi_q, phi_k = normal(1, 4, 24, rank).to(dtype), normal(1, 4, 24, rank).to(dtype)
    return LowRank(phi_q=phi_q, phi_k=phi_k, **fields)


#: terms -> most operations in inference, and in training forward and backward
CEILINGS: dict[str, tuple[Callable[[], tuple[Any, ...]], int, int]] = {
    "low_rank": (lambda: (low_rank(),), 5, 11),
    "low_rank-half": (lambda: (low_rank(FP16),), 5, 11),
    "low_rank-unsplit": (lambda: (low_rank(split=0),), 5, 11),
    "low_rank-key_bias": (lambda: (low_rank(), KeyBias(values=normal(1, 1, 24))), 5, 11),
    "dense": (lambda: (Dense(bias=normal(1, 4, 24, 32).half()),), 0, 0),
    # three groups of heads, whose factors are picked out and cut to their ranks
    "ranks": (lambda: (low_rank(ranks=(32, 16, 8, 8)),), 27, 45),
}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's own operations would be counted")
@pytest.mark.parametrize("name", CEILINGS)
def test_packing_takes_few_operations(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, most, most_in_training = CEILINGS[name]
    bias = ScoreBias(make(), 4)
    pack(bias, half=True, scale=0.17)  # what depends on shapes only is made once
    with Operations(monkeypatch) as operations:
        pack(bias, half=True, scale=0.17)
    assert sum(operations.found.values()) <= most, operations.found
    operations, given = Operations(monkeypatch), {"scale": 0.17, "head_scale": None}
    with operations:
        packed = pack_for_training(bias, half=True)
    first = 0
    for spec in packed.groups:
        last = first + len(spec.tensors)
        own = dict(zip(spec.tensors, packed.tensors[first:last], strict=True))
        with operations:
            rounded(spec, own, half=True, **given)
            _, as_read = rounded(spec, own, half=True, **given)  # again in the backward pass
        found = {n: as_read[n].float() for n in {"phi_q", "phi_k"} & own.keys()}
        with operations:
            factor_gradients(spec, own, found)
        first = last
    assert sum(operations.found.values()) <= most_in_training, operations.found
