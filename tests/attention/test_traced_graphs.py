"""Calls of few queries in compiled graphs: which hold kernels, and which the operator. No card."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode, fake_tensor

from flashbias_convert import ScoreBias
from flashbias_convert.attention import launch, traced_launch
from flashbias_convert.attention.group_calls import empty_output, group_calls
from flashbias_convert.attention.local_settings import settings_for
from flashbias_convert.attention.parts import MOST_QUERIES
from flashbias_convert.attention.tuning import LaunchSettings

from .cases import BIASES, Inputs
from .conftest import HAS_GPU, INTERPRETED
from .traced import HOPPER_BYTES, SIZES, arguments_of

pytest.importorskip("triton")

without_interpreter = pytest.mark.skipif(INTERPRETED, reason="traces need Triton's compiler")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[torch.fx.Node]]]:
    """Traces the operator with tensors of a card that is not there; gives calls of the graph."""
    from torch._functorch.aot_autograd import aot_function

    from flashbias_convert.attention.registration import attention_op

    def trace(x: Inputs, bias: ScoreBias | None = None, **options: Any) -> list[torch.fx.Node]:
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        def on_card(given: Any) -> Any:
            if isinstance(given, list):
                return [on_card(each) for each in given]
            if not isinstance(given, Tensor):
                return given
            return torch.empty_strided(
                given.shape, given.stride(), dtype=given.dtype, device="cuda"
            )

        given = arguments_of(x, bias, **options)
        with FakeTensorMode(), torch.no_grad():
            tensors = [on_card(each) for each in given]
            aot_function(lambda *tensors: attention_op(*tensors), keep)(*tensors)
        (graph,) = graphs
        return [node for node in graph.graph.nodes if node.op == "call_function"]

    if not HAS_GPU:
        from .ahead_of_time import HOPPER, AbsentCard, driver

        cpu = torch.device("cpu")
        monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda _: None)
        monkeypatch.setattr(driver, "_active", AbsentCard(HOPPER))
        monkeypatch.setattr(traced_launch, "_is_current", lambda device: device.type == "cuda")
        monkeypatch.setattr(traced_launch, "_memory_on_chip", lambda _: HOPPER_BYTES)
        monkeypatch.setattr(launch, "settings_for", lambda _, shape: settings_for(cpu, shape))
        monkeypatch.setattr(launch, "multiprocessors_of", lambda _: 132)
    yield trace


def names_of(nodes: list[torch.fx.Node]) -> set[str]:
    return {str(node.target) for node in nodes}


OPERATOR, KERNELS = "flashbias_convert.attention.default", "triton_kernel_wrapper_functional"


@without_interpreter
def test_graphs_hold_kernels(traced: Callable[..., list[torch.fx.Node]]) -> None:
    """With all that the compiler is to copy: what they write, which nobody else has."""
    x = Inputs(torch.device("cpu"), torch.bfloat16, n=1, m=4096, d=64)
    nodes = traced(x, x.bias(x.alibi()), causal=True)
    assert OPERATOR not in names_of(nodes)
    kernels = [node for node in nodes if str(node.target) == KERNELS]
    assert [node.kwargs["tensors_to_clone"] for node in kernels] == [["parts_ptr"], ["o_ptr"]]


@without_interpreter
def test_heads_that_differ(traced: Callable[..., list[torch.fx.Node]]) -> None:
    """Each group of heads has its own launch, and writes to the same output."""
    x = Inputs(torch.device("cpu"), torch.float16, **SIZES)
    nodes = traced(x, BIASES["heads-differ"](x))
    kernels = [node for node in nodes if str(node.target) == KERNELS]
    assert len(kernels) > 1 and OPERATOR not in names_of(nodes)
    assert all(node.kwargs["tensors_to_clone"] == ["o_ptr"] for node in kernels)


@without_interpreter
def test_masks_are_handed_on(traced: Callable[..., list[torch.fx.Node]]) -> None:
    """As they are: not every version of torch compiles other views of booleans."""
    x = Inputs(torch.device("cpu"), torch.bfloat16, n=1, m=64, batch=(2,))
    nodes = traced(x, key_mask=torch.ones(2, 64, dtype=torch.bool))
    assert names_of(nodes) == {
        "aten.new_empty_strided.default",
        KERNELS,
        "<built-in function getitem>",
    }


@without_interpreter
def test_kernels_are_looked_into_once(
    traced: Callable[..., list[torch.fx.Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch runs a function twice to make a graph of it; the first time, operators do."""
    launches, into_graph = [], traced_launch._into_graph

    def count(plan: Any, given: Any) -> None:
        launches.append(plan)
        into_graph(plan, given)

    monkeypatch.setattr(traced_launch, "_into_graph", count)
    x = Inputs(torch.device("cpu"), torch.bfloat16, n=1, m=64)
    traced(x)
    assert len(launches) == 1


@without_interpreter
@pytest.mark.parametrize(
    "why",
    ["queries", "export", "graphs", "C++", "watched", "empty", "cosine", "scale", "tiny scale",
     "large scale", "memory", "registers", "kernel", "card"],
)  # fmt: skip
def test_operators_stay(
    why: str, traced: Callable[..., list[torch.fx.Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._functorch import config
    from torch._inductor import config as inductor

    n = MOST_QUERIES + 1 if why == "queries" else 1
    batch = (0,) if why == "empty" else (2,)
    x = Inputs(torch.device("cpu"), torch.float16, n=n, m=64, batch=batch)
    scales = {"scale": float("inf"), "tiny scale": 1e-40, "large scale": 1e39}
    options = {name: {"scale": scale} for name, scale in scales.items()}
    options = (options | {"cosine": {"cosine": True}}).get(why, {})
    reasons: dict[str, Any] = {
        "export": config.patch(decompose_custom_triton_ops=False),
        "graphs": inductor.patch({"triton.cudagraphs": True}),
        "C++": inductor.patch(cpp_wrapper=True),
        "watched": launch.observed(lambda *_: None),
        "memory": mock.patch.object(traced_launch, "_memory_on_chip", lambda _: 20_000),
        "registers": launch.forced(LaunchSettings(16, 32, 4, 2, max_registers=128)),
        "kernel": mock.patch.object(traced_launch, "_in_graphs", dict),
        "card": mock.patch.object(traced_launch, "_is_current", lambda _: False),
    }
    if why == "registers":  # it is closed for being forced, too
        monkeypatch.setattr(traced_launch, "is_changed", lambda: False)
    with reasons.get(why, contextlib.nullcontext()):
        names = names_of(traced(x, **options))
    assert OPERATOR in names and KERNELS not in names


@without_interpreter
def test_other_sizes_stay_open_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for many sizes has no plan: sizes are constants of kernels."""
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    monkeypatch.setattr(traced_launch, "_is_current", lambda _: True)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = Inputs(torch.device("cpu"), torch.float16, n=1, m=64)
    q, k, v, *others = arguments_of(x, None)
    assert traced_launch._is_small(q, k, v, *others)
    dynamic = StatelessSymbolicContext([DimDynamic.STATIC] * 2 + [DimDynamic.DYNAMIC] * 2)
    k, v = (mode.from_tensor(each, symbolic_context=dynamic) for each in (k, v))
    assert not traced_launch._is_small(q, k, v, *others)


@without_interpreter
def test_cards_that_are_not_there() -> None:
    assert not traced_launch._is_current(torch.device("cuda", torch.cuda.device_count()))
    assert not traced_launch._is_current(torch.device("cpu"))


@without_interpreter
def test_tensors_of_other_kinds() -> None:
    class Other(Tensor):
        pass

    assert not traced_launch._may_open([Tensor, Other])


@without_interpreter
def test_exported_programs_keep_operators(traced: Callable[..., list[torch.fx.Node]]) -> None:
    """Also where they are decomposed."""
    from flashbias_convert.attention.registration import attention_op

    x = Inputs(torch.device("cpu"), torch.float16, n=1, m=64)

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = attention_op(q, k, v, *arguments_of(x, None)[3:])
            return out

    with FakeTensorMode():
        given = tuple(
            torch.empty(each.shape, dtype=each.dtype, device="cuda") for each in (x.q, x.k, x.v)
        )
    program = torch.export.export(Attention(), given)
    for each in (program, program.run_decompositions(), program.run_decompositions({})):
        called = [node for node in each.graph.nodes if node.op == "call_function"]
        assert names_of(called) == {OPERATOR}


@without_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["none", "low_rank", "dense", "lookup", "all"])
def test_estimated_memory(
    name: str, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of graphs compile for a card, and take no more of its memory than was counted."""
    from .ahead_of_time import HOPPER, AbsentCard, driver

    monkeypatch.setattr(driver, "_active", AbsentCard(HOPPER))
    counted: list[int] = []
    monkeypatch.setattr(traced_launch, "_memory_on_chip", lambda _: 2**30)
    most_bytes = traced_launch.most_bytes

    def count(*given: Any, **options: Any) -> int:
        counted.append(most_bytes(*given, **options))
        return counted[-1]

    monkeypatch.setattr(traced_launch, "most_bytes", count)
    x = Inputs(torch.device("cpu"), dtype, n=1, m=512, d=d)
    arguments = arguments_of(x, BIASES[name](x), causal=True)
    planned = traced_launch._planned(group_calls(empty_output(x.q, x.v), *arguments))
    assert planned is not None and len(planned) == len(counted)
    for each, most in zip(planned, counted, strict=True):
        given = each.first.arguments() | {"scale": 0.1, "query_start": 0}
        given |= {f"{n}_ptr": t for n, t in each.call.tensors.items()}
        given |= {"parts_ptr": torch.empty(16)} if each.second else {}
        kernel = traced_launch._in_graphs()[each.first.kernel]
        made = kernel.warmup(**given, grid=(1,), **each.first.options)
        assert most // 4 < made.metadata.shared <= most


@without_interpreter
def test_text_of_kernels_finds_graphs_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the rules of launches in it. Without a card there are none."""
    from torch._inductor.codegen.wrapper import (
        user_defined_triton_kernel_transitive_closure_source_code as text_of,
    )
    from torch._library.triton import get_triton_kernels_for_op

    from flashbias_convert.attention.rules_text import RULES, digest_of_rules

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not list(get_triton_kernels_for_op("flashbias_convert::attention"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = list(get_triton_kernels_for_op("flashbias_convert::attention"))
    assert {each.__name__ for each in found} == {"traced_attention_kernel", "traced_combine_kernel"}
    for each in found:
        assert digest_of_rules() in text_of(each)
    assert len(set(RULES)) == len(RULES) and "launch_table.csv" in RULES


def test_graphs_hold_no_kernels_of_the_interpreter(kernel: str) -> None:
    assert bool(traced_launch._in_graphs()) != INTERPRETED


@without_interpreter
def test_graphs_on_disk_do_not_know_other_launches() -> None:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    with launch.split_into(3), pytest.raises(BypassAOTAutogradCache):
        traced_launch.kernels()
