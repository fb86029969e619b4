"""Packed forms of a bias: made once, outside of compiled graphs. Needs no card."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import Axial, Dense, LowRank, Regions, RelativeTable, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention, prepared
from flashbias_convert.attention.packing import pack
from flashbias_convert.terms import Term
from tests.kernel_calls import Graphs, Launches, operations

H, N, D = 3, 20, 16
#: what packing factors cannot do without
PACKING = {"log2", "stack", "exp2"}


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    torch.compiler.reset()
    return Launches(monkeypatch)


def make_bias(seed: int = 0, heads: int = H) -> ScoreBias:
    """Factors, of some heads only, and a table: two groups."""
    make = torch.Generator().manual_seed(seed)
    phi_q, phi_k = torch.randn(2, heads - 1, N, 3, generator=make).unbind(0)
    table = torch.randn(heads, 2 * N, generator=make)
    u, v = torch.arange(N, dtype=torch.int32), torch.arange(N, dtype=torch.int32)
    some = tuple(range(heads - 1))
    factors = LowRank(phi_q=phi_q, phi_k=phi_k, heads=some)
    return ScoreBias((factors, RelativeTable(table=table, u=u, v=v)), heads)


def make_qkv(dtype: torch.dtype = torch.bfloat16, heads: int = H, d: int = D) -> Tensor:
    return torch.randn(3, 2, heads, N, d, dtype=dtype)


class Layer(nn.Module):
    def __init__(self, bias: PreparedBias, scale: float | None = None) -> None:
        super().__init__()
        self.bias, self.scale = bias, scale

    def forward(self, qkv: Tensor) -> Tensor:
        return flashbias_attention(*qkv, self.bias, scale=self.scale, backend="triton")


def compiled(layer: nn.Module, graphs: Graphs, **options: Any) -> Any:
    return torch.compile(layer, backend=graphs, fullgraph=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_that_is_compiled_first_takes_the_forms_as_inputs(
    dtype: torch.dtype, launches: Launches
) -> None:
    graphs, bias, qkv = Graphs(), make_bias(), make_qkv(dtype)
    cold, warm = Layer(PreparedBias(bias)), Layer(PreparedBias(bias))
    eager = launches.of(lambda: warm(qkv))
    first = launches.of(lambda: compiled(cold, graphs)(qkv))
    torch.compiler.reset()
    compiled(warm, graphs)(qkv)
    assert graphs.operations(0) == graphs.operations(1)
    assert not PACKING & graphs.operations(0).keys()
    assert len(eager) == len(first) == 2  # groups of heads
    for one, other in zip(eager, first, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in one.keys() - {"o"})


def test_one_graph_serves_all_that_look_alike(launches: Launches) -> None:
    graphs, qkv = Graphs(), make_qkv()
    layers = [Layer(PreparedBias(make_bias(seed))) for seed in range(3)]
    for layer in layers:
        layer.compile(backend=graphs, fullgraph=True)
    for seed, layer in enumerate(layers):
        (first, _) = launches.of(lambda layer=layer: layer(qkv))
        expected = pack(make_bias(seed), half=True, scale=D**-0.5)
        assert torch.equal(first["phi_q"], next(t for t in expected.tensors if t.dim() == 3))
    assert graphs.count == 1


def test_forms_are_those_that_were_asked_for() -> None:
    graphs = Graphs()
    one, other = PreparedBias(make_bias()), PreparedBias(make_bias(heads=2))
    compiled(Layer(one), graphs)(make_qkv())
    assert one.traced == {("attention", True, D**-0.5)} and not other.traced
    compiled(Layer(other, 2.0), graphs)(make_qkv(torch.float32, 2))
    assert one.traced == {("attention", True, D**-0.5)}
    assert other.traced == {("attention", False, None)}


def test_another_scale_has_a_form_of_its_own(launches: Launches) -> None:
    graphs, bias, qkv = Graphs(), PreparedBias(make_bias()), make_qkv()
    for scale in (0.5, 0.3):
        (first, _) = launches.of(lambda scale=scale: compiled(Layer(bias, scale), graphs)(qkv))
        packed = pack(bias.bias, half=True, scale=scale)
        assert torch.equal(first["phi_q"], next(t for t in packed.tensors if t.dim() == 3))


def test_a_head_size_that_a_trace_leaves_open_is_settled(launches: Launches) -> None:
    graphs, layer = Graphs(), Layer(PreparedBias(make_bias()))
    call = compiled(layer, graphs, dynamic=True)
    for d in (16, 8):
        (first, _) = launches.of(lambda d=d: call(make_qkv(d=d)))
        packed = pack(make_bias(), half=True, scale=d**-0.5)
        assert torch.equal(first["phi_q"], next(t for t in packed.tensors if t.dim() == 3))
    assert not any(PACKING & graphs.operations(i).keys() for i in range(graphs.count))


def test_terms_that_ask_for_gradients_are_not_frozen(launches: Launches) -> None:
    phi_q, phi_k = torch.randn(2, H, N, 3).unbind(0)
    phi_q.requires_grad_()
    bias = PreparedBias(ScoreBias((LowRank(phi_q=phi_q, phi_k=phi_k),), H))
    graphs, qkv = Graphs(), make_qkv()
    with torch.no_grad():
        call = compiled(Layer(bias, 1.0), graphs)
        (before,) = launches.of(lambda: call(qkv))
        phi_q.mul_(2)
        (after,) = launches.of(lambda: call(qkv))
        expected = pack(bias.bias, half=True, scale=1.0)
    assert graphs.operations().keys() >= PACKING
    assert torch.equal(after["phi_q"], expected.tensors[0])
    assert not torch.equal(after["phi_q"], before["phi_q"])


@pytest.mark.parametrize("trace", ["compile", "eager"])
def test_forms_serve_calls_in_every_mode(trace: str) -> None:
    bias, qkv = PreparedBias(make_bias()), make_qkv()
    call = compiled(Layer(bias), Graphs()) if trace == "compile" else Layer(bias)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        call(qkv)
    expected = pack(bias.bias, half=True, scale=D**-0.5)
    for one, other in zip(bias.packed(True, D**-0.5).tensors, expected.tensors, strict=True):
        assert not one.is_inference() and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_the_forms(strict: bool, launches: Launches) -> None:
    bias, qkv = PreparedBias(make_bias()), make_qkv()
    with torch.no_grad():
        program = torch.export.export(Layer(bias), (qkv,), strict=strict)
    found = {name.partition(".")[0] for name in operations(program.graph_module)}
    assert not PACKING & found and "attention" in found
    expected = launches.of(lambda: Layer(PreparedBias(make_bias()))(qkv))
    for call in (lambda: program.module()(qkv), lambda: Layer(bias)(qkv)):  # leaves nothing behind
        for one, other in zip(launches.of(call), expected, strict=True):
            assert all(torch.equal(one[k], other[k]) for k in other.keys() - {"o"})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_make_their_own_forms(copied: Any) -> None:
    bias = PreparedBias(make_bias())
    compiled(Layer(bias), Graphs())(make_qkv())
    other = copied(bias)
    assert bias.traced and not other.traced
    compiled(Layer(other), Graphs())(make_qkv())
    assert other.traced == bias.traced


def test_nothing_outlives_its_bias() -> None:
    gc.collect()
    before = len(prepared._GROUPS)
    bias = PreparedBias(make_bias(heads=7))
    assert len(prepared._GROUPS) == before + 1
    del bias
    gc.collect()
    assert len(prepared._GROUPS) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["dense", "regions"])
def test_terms_of_a_call_are_packed_alone(
    dtype: torch.dtype, kind: str, launches: Launches
) -> None:
    half, scale = (True, D**-0.5) if dtype != torch.float32 else (False, None)
    extra: Term = Dense(bias=torch.randn(1, N, N)) if kind == "dense" else Regions(
        ids=torch.arange(N, dtype=torch.int32) // 5
    )  # fmt: skip
    own, graphs, qkv = PreparedBias(make_bias()), Graphs(), make_qkv(dtype)
    whole = pack(ScoreBias((*own.bias.terms, extra), H), half=half, scale=scale)

    class WithExtra(Layer):
        def forward(self, qkv: Tensor) -> Tensor:
            return flashbias_attention(*qkv, self.bias.joined((extra,)), backend="triton")

    layer = WithExtra(own)
    for call in (compiled(layer, graphs), layer):
        seen = launches.of(lambda call=call: call(qkv))
        found = [
            launched[n] for launched, g in zip(seen, whole.groups, strict=True) for n in g.tensors
        ]
        assert all(torch.equal(a, b) for a, b in zip(found, whole.tensors, strict=True))
    assert not {"log2", "stack", "amax"} & graphs.operations().keys()
    assert own.joined((extra,)).packed(half, scale).spec == whole.spec


def test_terms_of_a_call_that_change_the_groups_are_packed_with_the_others() -> None:
    own = PreparedBias(make_bias())
    some = Dense(bias=torch.randn(1, N, N), heads=(1,))
    more = LowRank(phi_q=torch.randn(H, N, 20), phi_k=torch.randn(H, N, 20))
    rows = Axial(rel_h=torch.randn(H, N, 4).half(), rel_w=torch.randn(H, N, 5).half(),
                 y=torch.arange(N) // 5, x=torch.arange(N) % 5)  # fmt: skip
    for extra in (some, more, rows):
        whole = pack(ScoreBias((*own.bias.terms, extra), H), half=True, scale=1.0)
        found = own.joined((extra,)).packed(True, 1.0)
        assert found.spec == whole.spec
        assert all(torch.equal(a, b) for a, b in zip(found.tensors, whole.tensors, strict=True))
