"""What layers share is made once, until the tensor that it is made of changes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from flashbias_convert.built_terms import padded_alibi
from flashbias_convert.causal import _fit, _visible, key_table
from flashbias_convert.kept import kept_with, kept_with_both


def test_it_is_made_once_until_the_tensor_changes() -> None:
    tensor, made = torch.arange(3), []

    def make() -> int:
        made.append(int(tensor.sum()))
        return made[-1]

    assert kept_with(tensor, "sum", make) == kept_with(tensor, "sum", make) == 3
    assert kept_with(tensor, "other", make) == 3 and len(made) == 2
    tensor.add_(1)
    assert kept_with(tensor, "sum", make) == kept_with(tensor, "sum", make) == 6
    assert len(made) == 3


def test_what_two_tensors_make_is_made_until_either_changes() -> None:
    first, second, made = torch.arange(3), torch.arange(3), []

    def total(one: torch.Tensor) -> int:
        def make() -> int:
            made.append(int((first + one).sum()))
            return made[-1]

        return int(kept_with_both(first, one, "sum", make))

    assert total(second) == total(second) == 6 and len(made) == 1
    second.add_(1)
    assert total(second) == total(second) == 9 and len(made) == 2
    first.add_(1)
    assert total(second) == total(second) == 12 and len(made) == 3
    assert total(second.clone()) == 12 and len(made) == 4  # another one, although it is equal


@pytest.mark.parametrize("tracing", [False, True])
def test_parameters_and_traces_keep_nothing(tracing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(3) if tracing else nn.Parameter(torch.zeros(3))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: tracing)
    first = kept_with(tensor, "copy", tensor.detach().clone)
    tensor.data.add_(1)  # which no version tells of
    assert not torch.equal(first, kept_with(tensor, "copy", tensor.detach().clone))


def test_a_padding_mask_is_let_go_of_after_its_call() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    table = key_table(mask, mask.device)
    gone = weakref.ref(table)
    for m in (4, 6):
        places = _fit(table, 2, 2, m)
        assert places is _fit(table, 2, 2, m) and _visible(places) is _visible(places)
        calls = {"slopes": torch.ones(2), "places": places, "start": 2, "n": 2}
        one, other = padded_alibi(**calls), padded_alibi(**calls)
        assert one.pos_q is other.pos_q
        assert one.pos_q is not None and one.pos_q.tolist() == [[2, 3], [3, 4]]
    of_places = weakref.ref(places)
    gc.disable()  # at once, and not when somebody looks for cycles
    try:
        del table, places, one, other, calls
        assert gone() is None and of_places() is None
    finally:
        gc.enable()


def test_a_trace_makes_no_guard_on_which_tensors_they_are() -> None:
    """Compiled code would serve those of its first call alone."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=count)
    def call(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = kept_with_both(first, second, "sum", lambda: first + second)
        return made

    for n in range(3):
        assert torch.equal(call(torch.ones(3), torch.full((3,), n)), torch.full((3,), 1.0 + n))
    assert len(graphs) == 1
