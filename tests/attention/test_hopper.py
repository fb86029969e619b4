"""The kernel for Hopper: which launches it serves, and that it compiles and fits registers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import KeyBias, LowRank, ScoreBias
from flashbias_convert.attention.hopper import rules
from flashbias_convert.attention.packing import GroupSpec

from .cases import Inputs
from .conftest import INTERPRETED

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
OPTIONS = {"plain_scale": True, "causal": False, "cosine": False, "bounded": False}


def packed(n: int, d: int, dtype: torch.dtype = BF16, heads: int = 2) -> dict[str, Tensor]:
    """q, k, v and o as modules have them, (2, H, N, D)."""
    q, k, v = torch.empty(2, n, 3, heads, d, dtype=dtype).movedim(-3, 0).transpose(-2, -3).unbind(0)
    return {"q": q, "k": k, "v": v, "o": torch.empty(2, n, heads, d, dtype=dtype).transpose(1, 2)}


def factors(n: int, columns: int, heads: int = 2) -> dict[str, Tensor]:
    return {name: torch.empty(heads, n, columns, dtype=FP16) for name in ("phi_q", "phi_k")}


SPEC = GroupSpec(None, columns=16, scaled=True, tensors=("phi_q", "phi_k"))
BARE = GroupSpec(None)


def served(spec: GroupSpec, tensors: Mapping[str, Tensor], **options: bool) -> bool:
    return rules.serves(spec, tensors, **{**OPTIONS, **options})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a Hopper and its version of Triton; calls may be small."""
    monkeypatch.setattr(rules, "is_there", lambda _: True)
    monkeypatch.setattr(rules, "FEWEST_SCORES", 2**23)


@pytest.mark.parametrize(("d", "dtype"), [(64, BF16), (128, BF16), (128, FP16)])
def test_long_calls_with_factors_or_nothing_are_served(
    d: int, dtype: torch.dtype, card: None
) -> None:
    call = packed(2048, d, dtype)
    assert served(BARE, call) and served(SPEC, call | factors(2048, 16))
    one = {name: x[0] for name, x in call.items()}
    assert served(SPEC, one | factors(2048, 16))
    batch = {name: x.expand(2, -1, -1, -1) for name, x in factors(2048, 16).items()}
    assert served(SPEC, call | batch)


@pytest.mark.parametrize("option", ["causal", "cosine", "bounded"])
def test_options_that_it_does_not_know(option: str, card: None) -> None:
    assert not served(SPEC, packed(2048, 64) | factors(2048, 16), **{option: True})


def test_calls_that_it_does_not_know(card: None) -> None:
    call, own = packed(2048, 64), factors(2048, 16)
    other: dict[str, tuple[GroupSpec, dict[str, Any], dict[str, bool]]] = {
        "scales": (SPEC, {**call, **own}, {"plain_scale": False}),
        "heads apart": (GroupSpec((0,), columns=16, scaled=True), {**call, **own}, {}),
        "not scaled": (GroupSpec(None, columns=16), {**call, **own}, {}),
        "another term": (SPEC, {**call, **own, "key_bias": torch.empty(2, 2048)}, {}),
        "a mask": (BARE, {**call, "key_mask": torch.empty(2, 2048)}, {}),
        "a gate": (BARE, {**call, "gate": call["o"]}, {}),
        "training": (BARE, {**call, "lse": torch.empty(2, 2, 2048)}, {}),
        "short": (BARE, packed(1024, 64, heads=16), {}),
        "small": (BARE, {name: x[0, :1] for name, x in packed(2048, 64).items()}, {}),
        "narrow": (BARE, packed(2048, 32), {}),
        "between": (BARE, packed(2048, 80), {}),
        "fp16, 64": (BARE, packed(2048, 64, FP16), {}),
        "fp32": (BARE, packed(2048, 64, torch.float32), {}),
        "columns": (GroupSpec(None, columns=128, scaled=True),
                    {**packed(2048, 128), **factors(2048, 128)}, {}),
        "shared keys": (BARE, {**call, "k": call["k"][:, :1]}, {}),
        "fewer queries": (BARE, {**packed(4096, 64), "q": packed(2048, 64)["q"]}, {}),
        "heads with one k": (BARE, {**call, "k": call["k"][:, :1].expand(-1, 2, -1, -1)}, {}),
        "entries with one v": (BARE, {**call, "v": call["v"][:1].expand(2, -1, -1, -1)}, {}),
        "one query": (BARE, {**call, "q": call["q"][:, :, :1].expand(-1, -1, 2048, -1)}, {}),
        "one row of factors": (SPEC, {**call, **own, "phi_k": own["phi_k"][:, :1].expand(
            -1, 2048, -1)}, {}),
        "more batches of factors": (SPEC, {**call, **{n: x[None, None] for n, x in own.items()}},
                                    {}),
        "wide factors": (SPEC, {**call, **{n: x.float() for n, x in own.items()}}, {}),
        "other values": (BARE, {**call, "v": torch.empty(2, 2, 2048, 96, dtype=BF16)}, {}),
        "more batches": (BARE, {name: x[None] for name, x in call.items()}, {}),
        "channels apart": (BARE, {**call, "k": call["k"].mT.contiguous().mT}, {}),
        "odd rows": (BARE, {**call, "v": torch.empty(2, 2, 2048, 65, dtype=BF16)[..., :64]}, {}),
    }  # fmt: skip
    assert [name for name, (spec, x, more) in other.items() if served(spec, x, **more)] == []


def test_without_such_a_card_nothing_is_served() -> None:
    assert not served(BARE, packed(2048, 64)) and not rules.is_there(CPU)


triton = pytest.importorskip("triton")
if not INTERPRETED:
    from flashbias_convert.attention.hopper import plan

    from .ahead_of_time import HOPPER_SHARED_BYTES, NVDISASM, compile_attention

compiles = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter does not compile")
CASES = [(64, BF16, r) for r in (0, 16, 128)] + [(128, t, r) for t in (BF16, FP16) for r in (0, 64)]


@compiles
@pytest.mark.parametrize(("d", "dtype", "rank"), CASES)
def test_it_compiles_and_fits_registers(
    d: int, dtype: torch.dtype, rank: int, tmp_path: Path, card: None
) -> None:
    x = Inputs(CPU, dtype, n=2176, heads=2, d=d, dv=d, batch=(1,))
    bias = ScoreBias((x.low_rank(rank, split=0),), 2) if rank else None
    found = compile_attention(x.q, x.k, x.v, bias, hopper=True)
    # fp16 follows the largest score of each row, and has no second pass
    assert [c.constants["AGAIN"] for c in found] == ([False, True] if dtype == BF16 else [False])
    assert [c.constants["QUICK"] for c in found] == [dtype == BF16, False][: len(found)]
    for compiled in found:
        assert compiled.constants["R"] == rank and compiled.constants["D"] == d
        assert compiled.shared <= HOPPER_SHARED_BYTES
        if NVDISASM.is_file():
            assert compiled.spills_in_loops(tmp_path) == 0
            assert compiled.unwritten_registers(tmp_path) == []
            # in a step the scores are waited for, and later the product of values, which runs on
            steps = [waits for waits, products in compiled.waits_in_loops(tmp_path) if products]
            assert len(steps) == 4 and set(steps) == {2}, compiled.waits_in_loops(tmp_path)


@compiles
def test_what_it_does_not_serve_goes_to_the_usual_kernel(card: None) -> None:
    x = Inputs(CPU, BF16, n=2176, heads=2, d=64, dv=64, batch=(1,))
    values = torch.zeros(2, x.m)
    (found,) = compile_attention(x.q, x.k, x.v, x.bias(KeyBias(values=values)), hopper=True)
    assert "AGAIN" not in found.constants
    apart = torch.empty(x.q.numel() + 1, dtype=BF16)[1:].view(x.q.shape)  # not aligned
    (found,) = compile_attention(apart, x.k, x.v, hopper=True)
    assert "AGAIN" not in found.constants


@compiles
def test_a_compiler_that_fails_is_told_once(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise ValueError("no such layout")

    ran: list[int] = []

    class Usual:
        def run(self, device: Any, tensors: Any, numbers: Any = ()) -> None:
            ran.append(len(tuple(tensors)))

    monkeypatch.setattr(plan, "_kernel", Broken)
    monkeypatch.setattr(rules, "_GIVEN_UP", [])
    call = packed(2048, 64) | factors(2048, 16)
    assert served(SPEC, call)
    plans = [plan.HopperPlan(call, 16, Usual()) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"usual kernel.*no such layout"):
        plans[0].run(CPU, call.values(), (0.125, 0))
    for made in plans:
        made.run(CPU, call.values(), (0.125, 0))
    assert ran == [6, 6, 6] and not served(SPEC, call)


@compiles
@pytest.mark.parametrize("columns", [0, 16])
def test_arguments_are_in_the_order_of_the_kernel(columns: int) -> None:
    """Launches of a compiled kernel tell them apart by their places."""
    call = packed(2048, 64) | (factors(2048, columns) if columns else {})
    made = plan.HopperPlan(call, columns, None)  # type: ignore[arg-type]
    every = {**made.arguments(call, 0.125, None), **made.constants(again=False)}
    assert list(every) == plan._kernel().arg_names


@compiles
def test_factors_that_entries_share_are_read_once() -> None:
    term = LowRank(phi_q=torch.randn(2, 2048, 16), phi_k=torch.randn(2, 2048, 16))
    assert term.largest_rank == 16
    call = packed(2048, 64) | factors(2048, 16)
    call["phi_k"] = torch.empty(1, 2048, 16, dtype=FP16).expand(2, -1, -1)
    values = plan.HopperPlan(call, 16, None).arguments(call, 0.125, None)  # type: ignore[arg-type]
    assert [values[f"many_{name}"] for name in ("qb", "qh", "kb", "kh")] == [0, 1, 0, 0]
    assert values["phi_k_desc"].shape == [1, 1, 2048, 16]
    call["phi_q"] = torch.empty(2, 2, 2048, 16, dtype=FP16)
    values = plan.HopperPlan(call, 16, None).arguments(call, 0.125, None)  # type: ignore[arg-type]
    assert [values[f"many_{name}"] for name in ("qb", "qh", "kb", "kh")] == [1, 1, 0, 0]
