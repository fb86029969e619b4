"""The kernel for Hopper: which launches it serves, and that it compiles and fits registers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashbias_convert import KeyBias, LowRank
from flashbias_convert.attention.hopper import forms, rules
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


def slopes(heads: int = 2) -> dict[str, Tensor]:
    return {"slopes": torch.empty(heads)}


def values(n: int, heads: int = 2) -> dict[str, Tensor]:
    return {"key_bias": torch.empty(heads, n)}


def table(n: int, heads: int = 2) -> dict[str, Tensor]:
    codes = {name: torch.empty(n, dtype=torch.int32) for name in ("codes_q", "codes_k")}
    return {"table": torch.empty(heads, 4 * n), **codes}


SPEC = GroupSpec(None, columns=16, scaled=True, tensors=("phi_q", "phi_k"))
BARE = GroupSpec(None)
RISING = GroupSpec(None, by_distance=1)


def form(spec: GroupSpec, tensors: Mapping[str, Tensor], **options: bool) -> forms.Form | None:
    return rules.form_of(spec, tensors, **{**OPTIONS, **options})


def served(spec: GroupSpec, tensors: Mapping[str, Tensor], **options: bool) -> bool:
    return form(spec, tensors, **options) is not None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a Hopper and its version of Triton; calls may be small."""
    monkeypatch.setattr(rules, "is_there", lambda _: True)
    monkeypatch.setattr(rules, "FEWEST_SCORES", 2**22)
    monkeypatch.setattr(rules, "FEWEST_OF_ONE_PASS", 2**20)


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


@pytest.mark.parametrize(("d", "dtype"), [(64, BF16), (128, BF16), (128, FP16)])
def test_causal_calls_and_biases_of_a_key_are_served(
    d: int, dtype: torch.dtype, card: None
) -> None:
    call = packed(2048, d, dtype, heads=4)
    made = form(BARE, call, causal=True)
    assert made is not None and made.causal and made.bias == forms.NO_BIAS and not made.reach
    made = form(SPEC, call | factors(2048, 16, heads=4), causal=True)
    assert made is not None and made.causal and made.columns == 16
    made = form(BARE, packed(1984, d, dtype, heads=4) | slopes(4), causal=True)
    assert made is not None and made.bias == forms.ALIBI and not made.reach
    made = form(BARE, packed(2048, d, dtype, heads=4) | slopes(4), causal=True)
    assert made is not None and made.reach
    made = form(BARE, call | values(2048, 4))
    assert made is not None and made.bias == forms.KEY_BIAS and not made.causal


def test_tables_are_served_with_heads_of_64(card: None) -> None:
    assert form(BARE, packed(1025, 64, heads=8) | table(1025, 8)) is None
    for step, bias in ((1, forms.RISING), (-1, forms.FALLING)):
        spec = GroupSpec(None, by_distance=step)
        for causal in (False, True):
            made = form(spec, packed(2048, 64, heads=4) | table(2048, 4), causal=causal)
            assert made is not None and (made.bias, made.keys, made.quick) == (bias, 64, True)
            assert made.causal == causal
        for dtype in (BF16, FP16):
            made = form(spec, packed(544, 64, dtype, heads=16) | table(544, 16))
            assert made is not None and (made.quick, made.tail) == (False, 32)


def test_short_calls_take_two_programs_beside_each_other(card: None) -> None:
    made = form(BARE, packed(1025, 64, heads=8))
    assert made is not None and (made.keys, made.turns, made.tail) == (64, False, 16)
    made = form(BARE, packed(1056, 64, heads=8))
    assert made is not None and made.tail == 32
    for n in (1024, 1060):
        made = form(BARE, packed(n, 64, heads=8))
        assert made is not None and made.keys == 64 and made.tail == 0
    made = form(BARE, packed(2049, 64, heads=8))
    assert made is not None and (made.keys, made.turns, made.tail) == (128, True, 0)
    wide = GroupSpec(None, columns=128, scaled=True)
    made = form(wide, packed(1025, 64, heads=8) | factors(1025, 128, heads=8))
    assert made is not None and (made.keys, made.turns) == (128, True)


def test_wide_heads_need_half_as_many_scores(card: None) -> None:
    for d in (64, 128):
        call = {name: x[:1] for name, x in packed(1500, d, heads=1).items()}
        assert served(BARE, call) == (d == 128)
        assert not served(BARE, call, causal=True)


def test_a_form_is_one_integer() -> None:
    made = forms.Form(128, 64, causal=True, bias=forms.KEY_BIAS, quick=False, tail=32, again=True)
    found = {name: forms.read(made.code(), name) for name, _, _ in forms.FIELDS}
    assert found == {name: int(getattr(made, name.lower())) for name in found}
    with pytest.raises(ValueError, match="head of a form cannot be 72"):
        forms.Form(72).code()
    with pytest.raises(KeyError):
        forms.read(made.code(), "WIDTH")


def test_rows_of_a_bias_per_key() -> None:
    x = torch.empty(2, 3, 64)
    assert rules.rows_of(x) == (64, 3, 1) and rules.rows_of(x[0]) == (64, 0, 1)
    assert rules.rows_of(x[:, :1]) == (192, 1, 0) and rules.rows_of(x[:1, :1]) == (64, 0, 0)
    assert rules.rows_of(x[:, :1].expand(-1, 3, -1)) == (192, 1, 0)
    assert rules.rows_of(x[:1].expand(2, -1, -1)) == (64, 0, 1)
    assert rules.rows_of(x.transpose(0, 1)) == (64, 1, 3)
    assert rules.rows_of(x[..., ::2]) is None and rules.rows_of(torch.empty(2, 65)) is None
    assert rules.rows_of(torch.empty(1, 65)) == (68, 0, 0)
    assert rules.rows_of(torch.empty(1, 1, 1, 64)) is None


@pytest.mark.parametrize("option", ["cosine", "bounded"])
def test_options_that_it_does_not_know(option: str, card: None) -> None:
    assert not served(SPEC, packed(2048, 64) | factors(2048, 16), **{option: True})


def test_calls_that_it_does_not_know(card: None) -> None:
    call, own = packed(2048, 64), factors(2048, 16)
    other: dict[str, tuple[GroupSpec, dict[str, Any], dict[str, bool]]] = {
        "scales": (SPEC, {**call, **own}, {"plain_scale": False}),
        "heads apart": (GroupSpec((0,), columns=16, scaled=True), {**call, **own}, {}),
        "not scaled": (GroupSpec(None, columns=16), {**call, **own}, {}),
        "another term": (SPEC, {**call, **own, **values(2048)}, {}),
        "a mask": (BARE, {**call, "key_mask": torch.empty(2, 2048)}, {}),
        "a gate": (BARE, {**call, "gate": call["o"]}, {}),
        "training": (BARE, {**call, "lse": torch.empty(2, 2, 2048)}, {}),
        "short": (BARE, packed(1023, 64, heads=16), {}),
        "short, a bias per key": (BARE, {**packed(1496, 64, heads=16), **values(1496, 16)}, {}),
        "small, causal": (BARE, {name: x[0, :1] for name, x in call.items()}, {"causal": True}),
        "ALiBi that is not causal": (BARE, {**call, **slopes()}, {}),
        "ALiBi by absolute distance": (GroupSpec(None, symmetric=True), {**call, **slopes()},
                                       {"causal": True}),
        "ALiBi of positions": (BARE, {**call, **slopes(), "pos_q": torch.empty(2048)},
                               {"causal": True}),
        "one slope for all": (BARE, {**call, **slopes(1)}, {"causal": True}),
        "slopes apart": (BARE, {**call, "slopes": torch.empty(2, 2)[:, 0]}, {"causal": True}),
        "slopes of each batch entry": (BARE, {**call, "slopes": torch.empty(2, 2)},
                                       {"causal": True}),
        "ALiBi and factors": (SPEC, {**call, **own, **slopes()}, {"causal": True}),
        "a table of any codes": (BARE, {**call, **table(2048)}, {}),
        "a bias per key, fp16, 64": (BARE, {**packed(2048, 64, FP16), **values(2048)}, {}),
        "distances, heads of 128": (GroupSpec(None, by_distance=1),
                                    {**packed(2048, 128), **table(2048)}, {}),
        "a gated table": (RISING, {**call, **table(2048), "table_rows": call["o"]}, {}),
        "tables of each batch entry": (RISING, {**call, **table(2048),
                                              "table": torch.empty(2, 2, 99)}, {}),
        "tables apart": (RISING, {**call, **table(2048), "table": torch.empty(2, 99, 2)[..., 0]},
                         {}),
        "wide codes": (RISING, {**call, **table(2048), "codes_q": torch.empty(2048).long()}, {}),
        "codes apart": (RISING, {**call, **table(2048),
                               "codes_k": torch.empty(2048, 2, dtype=torch.int32)[:, 0]}, {}),
        "a bias per key, causal": (BARE, {**call, **values(2048)}, {"causal": True}),
        "a gated bias per key": (BARE, {**call, **values(2048), "key_bias_rows": call["o"]}, {}),
        "a bias of keys apart": (BARE, {**call, "key_bias": torch.empty(2, 4096)[:, ::2]}, {}),
        "small": (BARE, {name: x[0, :1, :1920] for name, x in packed(2048, 64).items()}, {}),
        "narrow": (BARE, packed(2048, 32), {}),
        "between": (BARE, packed(2048, 80), {}),
        "few scores": (GroupSpec(None, by_distance=1),
                       {name: x[:1, :1] for name, x in packed(544, 64).items()} | table(544), {}),
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
    from triton.runtime import driver

    from flashbias_convert.attention.direct_launch import DirectLaunch
    from flashbias_convert.attention.hopper import described, plan

    from .ahead_of_time import HOPPER_SHARED_BYTES, NVDISASM, compile_attention

compiles = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter does not compile")
WIDE = ((64, BF16), (128, BF16))
CASES = [("plain", 2176, 64, BF16, r) for r in (0, 16, 128)]
CASES += [("plain", 2176, 128, t, r) for t in (BF16, FP16) for r in (0, 64)]
CASES += [("plain", 1025, 64, BF16, r) for r in (0, 64)]
CASES += [("causal", 2176, d, t, r) for d, t in (*WIDE, (128, FP16)) for r in (0, 64)]
CASES += [("causal", 2176, 64, BF16, 128)]
CASES += [("alibi", n, d, t, 0) for d, t in (*WIDE, (128, FP16)) for n in (1984, 2176)]
CASES += [(kind, n, 64, t, 0) for kind in ("rising", "falling", "causal rising")
          for n, t in ((1025, BF16), (2176, BF16), (992, FP16))]  # fmt: skip
CASES += [("key bias", 2176, d, t, 0) for d, t in (*WIDE, (128, FP16))]


@compiles
@pytest.mark.parametrize(("kind", "n", "d", "dtype", "rank"), CASES)
def test_it_compiles_and_fits_registers(
    kind: str, n: int, d: int, dtype: torch.dtype, rank: int, tmp_path: Path, card: None
) -> None:
    x = Inputs(CPU, dtype, n=n, heads=12, d=d, dv=d, batch=(1,))
    terms = {"alibi": x.alibi, "key bias": x.key_bias, 
             "rising": lambda: x.distances(1), "falling": lambda: x.distances(-1),
             "causal rising": lambda: x.distances(1)}  # fmt: skip
    term = terms[kind]() if kind in terms else x.low_rank(rank, split=0) if rank else None
    causal = kind in ("alibi", "causal", "causal rising")
    bias = None if term is None else x.bias(term)
    found = compile_attention(x.q, x.k, x.v, bias, hopper=True, causal=causal)
    reaches = kind == "alibi" and n > 2048
    assert [c.name for c in found[:reaches]] == ["lengths_kernel"] * reaches
    first, *again = found[reaches:]
    # fp16 follows the largest score of each row, and has no second pass
    assert len(again) == (dtype == BF16)
    for compiled in (first, *again):
        code = compiled.constants["FORM"]
        assert forms.read(code, "COLUMNS") == rank and forms.read(code, "HEAD") == d
        assert bool(forms.read(code, "CAUSAL")) == causal
        assert bool(forms.read(code, "AGAIN")) == (compiled is not first)
        assert bool(forms.read(code, "QUICK")) == (dtype == BF16 and compiled is first)
        assert compiled.shared <= HOPPER_SHARED_BYTES
        if NVDISASM.is_file():
            assert compiled.spills_in_loops(tmp_path) == 0
            assert compiled.unwritten_registers(tmp_path) == []
            # in a step the scores are waited for, and later the product of values, which runs on
            steps = [waits for waits, products in compiled.waits_in_loops(tmp_path) if products]
            assert len(steps) >= forms.read(code, "GROUPS") and set(steps) == {2}


@compiles
def test_what_it_does_not_serve_goes_to_the_usual_kernel(card: None) -> None:
    x = Inputs(CPU, BF16, n=2176, heads=2, d=64, dv=64, batch=(1,))
    values = torch.zeros(2, x.m, 2)[..., 0]
    (found,) = compile_attention(x.q, x.k, x.v, x.bias(KeyBias(values=values)), hopper=True)
    assert "FORM" not in found.constants
    apart = torch.empty(x.q.numel() + 1, dtype=BF16)[1:].view(x.q.shape)  # not aligned
    (found,) = compile_attention(apart, x.k, x.v, hopper=True)
    assert "FORM" not in found.constants
    short = Inputs(CPU, BF16, n=2176, heads=4, d=64, dv=64, batch=(1,))
    options = {"causal": True, "query_start": 7}
    (found,) = compile_attention(short.q, short.k, short.v, hopper=True, **options)
    assert "FORM" not in found.constants


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
    made = form(SPEC, call)
    assert made is not None
    plans = [plan.HopperPlan(call, made, Usual()) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"usual kernel.*no such layout"):
        plans[0].run(CPU, call.values(), (0.125, 0))
    for one in plans:
        one.run(CPU, call.values(), (0.125, 0))
    assert ran == [6, 6, 6] and not served(SPEC, call)


@compiles
@pytest.mark.parametrize("kind", ["plain", "factors", "alibi", "key bias", "table"])
def test_arguments_are_in_the_order_of_the_kernel(kind: str) -> None:
    """Launches of a compiled kernel tell them apart by their places."""
    more = {"plain": {}, "factors": factors(2048, 16), "alibi": slopes(), "key bias": values(2048),
            "table": table(2048)}  # fmt: skip
    call = packed(2048, 64) | more[kind]
    kinds = {"alibi": forms.ALIBI, "key bias": forms.KEY_BIAS, "table": forms.RISING}
    bias = kinds.get(kind, forms.NO_BIAS)
    own = forms.Form(64, 16 * (kind == "factors"), bias=bias, reach=kind == "alibi")
    made = plan.HopperPlan(call, own, None)  # type: ignore[arg-type]
    zeros = torch.zeros(1000, dtype=torch.int32)
    every = {**made.arguments(call, 0.125, zeros), **made.constants(again=False)}
    assert list(every) == plan._kernel().arg_names


@compiles
def test_factors_that_entries_share_are_read_once() -> None:
    term = LowRank(phi_q=torch.randn(2, 2048, 16), phi_k=torch.randn(2, 2048, 16))
    assert term.largest_rank == 16
    call = packed(2048, 64) | factors(2048, 16)
    own = forms.Form(64, 16)
    call["phi_k"] = torch.empty(1, 2048, 16, dtype=FP16).expand(2, -1, -1)
    values = plan.HopperPlan(call, own, None).arguments(call, 0.125, None)  # type: ignore[arg-type]
    assert [values[f"many_{name}"] for name in ("qb", "qh", "kb", "kh")] == [0, 1, 0, 0]
    assert values["phi_k_desc"].shape == [1, 1, 2048, 16]
    call["phi_q"] = torch.empty(2, 2, 2048, 16, dtype=FP16)
    values = plan.HopperPlan(call, own, None).arguments(call, 0.125, None)  # type: ignore[arg-type]
    assert [values[f"many_{name}"] for name in ("qb", "qh", "kb", "kh")] == [1, 1, 0, 0]


@compiles
def test_a_bias_per_key_is_read_as_rows() -> None:
    call = packed(2048, 64) | {"key_bias": torch.empty(2, 1, 2048)}
    made = plan.HopperPlan(call, forms.Form(64, bias=forms.KEY_BIAS), None)  # type: ignore[arg-type]
    found = made.arguments(call, 0.125, None)
    assert (found["many_bb"], found["many_bh"]) == (1, 0)
    assert found["key_bias_desc"].shape == [2, 2048] and found["to_exp2"] == rules.LOG2E


def make_tensordesc_arg(arg: Any, meta: list[str]) -> list[Any]:
    """As Triton's: what a launch takes of a description. `meta` counts how often it was asked."""
    meta.append("asked")
    return [(meta[0], arg.base.data_ptr()), *arg.shape, *arg.strides]


class _Launcher:
    """What Triton 3.6 launches with: descriptions are encoded in every launch."""

    launch_cooperative_grid, launch_pdl = False, True
    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.metas = [["first"], ["second"]]
        launcher, tensordesc_indices, tensordesc_meta = self.note, {0, 2}, self.metas

        def inner(*args: Any) -> None:
            final, met = list(args[:13]), 0
            for i, arg in enumerate(args[13:]):
                if i in tensordesc_indices:
                    final += make_tensordesc_arg(arg, tensordesc_meta[met])
                    met += 1
                else:
                    final.append(arg)
            launcher(*final)

        self.launch = inner

    def note(self, *args: Any) -> None:
        self.calls.append(args)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, False, True, None, None, *rest)


@compiles
def test_places_in_memory_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch gives to Triton's launcher is what Triton gives to it."""
    run = _Launcher()
    made = SimpleNamespace(run=run, function=77, packed_metadata=(1, 2))
    card = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
    tiles = described.row_tiles(torch.empty(2, 96, 64, dtype=BF16), 64)
    one, other = (torch.zeros(2, 96, 64, dtype=BF16) for _ in range(2))
    with mock.patch.object(driver, "_active", card):
        ours, direct = described.DescribedLaunch(made), DirectLaunch(made)
        for tensors in ((one, other), (one, other), (other, other)):
            values = [tiles.of(tensors[0]), 3.5, tiles.of(tensors[1]), None]
            direct(9, values)
            before = sum(map(len, run.metas))
            ours(9, values)
            assert run.calls[-1] == run.calls[-2] and run.calls[-1][-1] is None
            asked = sum(map(len, run.metas)) - before
            assert asked == {1: 2, 2: 0, 3: 1}[len(run.calls) // 2]
        monkeypatch.setattr(described, "MOST_KNOWN", 1)
        ours(9, values)
        assert run.calls[-1] == run.calls[-2]
        # scratch memory, or a launcher of another make
        run.global_scratch_size = 8
        assert described.DescribedLaunch(made)._encode is None
        run.global_scratch_size, run.launch = 0, run.note
        strange = described.DescribedLaunch(made)
        strange(9, values)
        assert strange._encode is None and run.calls[-1][-4:] == tuple(values)
