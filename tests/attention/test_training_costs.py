"""With `deterministic=False`, "auto" trains in whatever way a table says is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert import LowRank, ScoreBias
from flashbias_convert.attention import (
    PreparedBias,
    backends,
    flashbias_attention,
    operator,
    training_costs,
)
from flashbias_convert.attention.training_costs import KEY_BIAS, fastest, form_name
from flashbias_convert.cost_tables import CLASSES, FIELDS

from .cases import Inputs

CPU = torch.device("cpu")
Row = tuple[int, int, str, float]
Write = Callable[..., None]


def row(way: str, columns: int, n: int, cost: float, d: int = 32, **more: Any) -> Row:
    flags = {"trained": False, "causal": False, "dtype": "float16"} | more
    return d, n, form_name(way, flags.pop("dtype"), columns, **flags), cost


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a table that takes the place of the committed one."""
    file = tmp_path / "costs.csv"

    def write(*rows: Row, of_class: str = "cpu") -> None:
        lines = [",".join(FIELDS)]
        lines += [f'{d},{n},"{form}",1.0,{cost},{of_class},,,' for d, n, form, cost in rows]
        file.write_text("\n".join(lines) + "\n")
        training_costs._table.cache_clear()

    monkeypatch.setattr(training_costs, "TABLE", file)
    write()
    yield write
    training_costs._table.cache_clear()


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that calls were computed in; nothing is computed."""
    seen: list[str] = []

    def kernels(q: Any, k: Any, v: Any, bias: Any, args: Any, deterministic: bool = True) -> Any:
        if not torch.compiler.is_compiling():
            seen.append("triton" if deterministic else "atomics")
        return 2 * q

    def sdpa(q: Any, k: Any, v: Any, bias: Any, args: Any) -> Any:
        if not torch.compiler.is_compiling():
            seen.append("sdpa")
        return 3 * q

    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(operator, "training_attention", kernels)
    monkeypatch.setattr(operator, "sdpa_attention", sdpa)
    return seen


def train(x: Inputs, bias: ScoreBias | None = None, **options: Any) -> None:
    options = {"deterministic": False, **options}
    given = None if bias is None else PreparedBias(bias)
    flashbias_attention(x.q.requires_grad_(), x.k, x.v, given, **options)


def inputs(n: int = 20, **sizes: Any) -> Inputs:
    return Inputs(CPU, torch.float16, n=n, **{"d": 32, **sizes})


# -- the table -----------------------------------------------------------------------------


def test_the_committed_table_is_one() -> None:
    lines = training_costs.TABLE.read_text("utf-8").splitlines()
    assert tuple(lines[0].split(",")) == FIELDS
    for name in {*CLASSES.values()}:
        training_costs.read_costs("\n".join(lines), name)


def test_the_fastest_by_length(table: Write) -> None:
    table(
        *(row("triton", 0, n, c) for n, c in ((64, 1.0), (256, 1.0), (1024, 1.0), (4096, 1.0))),
        *(row("atomics", 0, n, c) for n, c in ((64, 2.0), (256, 0.5), (1024, 0.6), (4096, 1.0))),
        *(row("sdpa", 0, n, c) for n, c in ((64, 3.0), (256, 0.7), (1024, 0.8))),
    )
    call = (CPU, "float16", 32, 0, 0, False, False)
    # as long as nothing is gained, the same bits
    expected = ((64 * 256, "triton"), (1024 * 4096, "atomics"), (0, "triton"))
    assert fastest(*call) == expected


def test_what_is_not_measured_favours_the_kernels(table: Write) -> None:
    table(
        row("triton", 16, 64, 2.0), row("atomics", 16, 64, 1.0), row("sdpa", 48, 64, 0.5),
        row("triton", KEY_BIAS, 64, 2.0), row("sdpa", KEY_BIAS, 64, 1.0),
        row("triton", 0, 64, 2.0, trained=True, causal=True),
    )  # fmt: skip

    def way(
        columns: int, sdpa: int | None, trained: bool = False, causal: bool = False,
        dtype: str = "float16", d: int = 32,
    ) -> str:  # fmt: skip
        spans = fastest(CPU, dtype, d, columns, sdpa, trained, causal)
        return spans[-1][1] if spans else "nothing"

    assert way(16, 48) == way(16, 20) == way(16, 20, d=24) == "sdpa"
    assert way(16, 49) == way(16, None) == "atomics"
    assert way(KEY_BIAS, KEY_BIAS) == "sdpa" and way(KEY_BIAS, None) == "triton"
    assert way(32, 20) == way(16, 48, d=33) == way(16, 48, dtype="bfloat16") == "nothing"
    assert way(16, 48, trained=True) == way(16, 48, causal=True) == "nothing"
    assert way(0, 0, trained=True, causal=True) == "triton"


# -- the rule ------------------------------------------------------------------------------


def test_without_a_row_atomics_if_allowed(table: Write, ways: list[str]) -> None:
    """Rows of other cards are no rows, whatever they say."""
    x = inputs()
    train(x)
    table(row("triton", 0, 64, 2.0), row("sdpa", 0, 64, 1.0), of_class="hopper")
    train(x)
    train(x, deterministic=True)
    assert ways == ["atomics", "atomics", "triton"]


def test_an_unknown_card_has_no_class(monkeypatch: pytest.MonkeyPatch, table: Write) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (99, 0))
    device = torch.device("cuda", 0)
    assert training_costs.card_class(device) is None and not training_costs.is_measured(device)


def test_the_table_decides_by_length(table: Write, ways: list[str]) -> None:
    table(row("triton", 0, 16, 1.0), row("triton", 0, 64, 2.0), row("sdpa", 0, 16, 2.0),
          row("sdpa", 0, 64, 1.0))  # fmt: skip
    for n in (31, 32, 33):
        train(inputs(n))
    assert ways == ["triton", "sdpa", "sdpa"]


def test_only_where_bits_do_not_count(table: Write, ways: list[str]) -> None:
    """Torch's attention adds with atomics, too."""
    table(row("triton", 0, 64, 2.0), row("atomics", 0, 64, 1.5), row("sdpa", 0, 64, 1.0))
    x = inputs()
    train(x)
    train(x, deterministic=True)
    train(x, backend="triton")
    train(x, backend="triton", deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        train(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ways == ["sdpa", "triton", "atomics", "triton", "triton"]


def test_only_where_memory_stays_linear(table: Write, ways: list[str]) -> None:
    """And only calls of the kind that was measured."""
    table(*(row(way, c, 64, cost, causal=causal, trained=trained)
            for way, cost in (("triton", 2.0), ("sdpa", 1.0)) for c in (0, 16, KEY_BIAS)
            for causal in (False, True) for trained in (False, True)))  # fmt: skip
    x = inputs()
    mask = x.integers(2, 2, 20) > 0
    scale = torch.ones(2)
    yes: list[tuple[Any, dict[str, Any]]] = [
        (None, {}), (None, {"causal": True}), (x.bias(x.low_rank(5)), {}),
        (x.bias(x.low_rank(2), x.low_rank(3)), {"causal": True}), (x.bias(x.key_bias()), {}),
    ]  # fmt: skip
    for bias, options in yes:
        train(x, bias, **options)
    assert ways == ["sdpa"] * len(yes)
    ways.clear()
    no: list[tuple[Any, dict[str, Any]]] = [
        (None, {"key_mask": mask}), (None, {"causal": True, "query_start": 1}),
        (None, {"cosine": True}), (None, {"scale": scale}),
    ]  # fmt: skip
    for bias, options in no:
        train(x, bias, **options)
    train(inputs(kv_heads=1))
    assert ways == ["triton"] * (len(no) + 1)
    ways.clear()
    other = (x.dense(), x.alibi(), x.table(), x.rows(x.low_rank(2)))
    for term in other:
        train(x, x.bias(term))
    train(x, x.bias(x.low_rank(2, heads=(0,))))
    train(x, x.bias(x.low_rank(2), x.key_bias()))
    assert ways == ["triton"] * (len(other) + 2)


def test_inference_does_not_ask(table: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    table(row("triton", 0, 64, 2.0), row("sdpa", 0, 64, 1.0))
    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(operator, "triton_attention", lambda q, *_: 5 * q)
    x = inputs()
    assert torch.equal(flashbias_attention(x.q, x.k, x.v, deterministic=False), 5 * x.q)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_choice_is_a_constant_of_the_graph(
    dynamic: bool, table: Write, ways: list[str]
) -> None:
    """Whole graphs, one on each side of a limit, however many lengths there are."""
    table(*(row(way, c, n, cost, trained=c > 0) for c in (0, 16, 48) for way, n, cost in (
        ("triton", 16, 1.0), ("triton", 64, 2.0), ("sdpa", 16, 2.0), ("sdpa", 64, 1.0))
    ))  # fmt: skip
    torch._dynamo.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *phi: torch.Tensor) -> Any:
        bias = ScoreBias((LowRank(phi_q=phi[0], phi_k=phi[1]),), 2) if phi else None
        return flashbias_attention(q, k, v, bias, deterministic=False)

    for rank in (0, 3):
        before = graphs
        compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=count)
        for n in (40, 48, 56, 24):
            x = inputs(n)
            phi = [t.requires_grad_() for t in x.normal(2, 2, n, rank)] if rank else []
            out = compiled(x.q.requires_grad_(), x.k, x.v, *phi)
            assert torch.equal(out, (3 if n > 32 else 2) * x.q)
        # factors settle the length of a graph, whatever it is compiled for
        assert graphs - before <= (2 if dynamic and not rank else 4)
