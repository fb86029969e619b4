"""What compiled code checks in each call: next to nothing of a patched module that nobody touched.

torch.compile passes over a module whose dictionaries are what they were, if nothing but modules,
dictionaries, tensors, numbers and strings was read of it: such a one is "tag safe" in the tree of
guards. On a card a language model decodes a token in less time than it takes to check the others.
"""

from __future__ import annotations

import gc
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from flashbias_convert import patch_model
from flashbias_convert.attention import backends, registration
from flashbias_convert.swap import patched_modules, patched_owners
from tests.device.models import CASES

pytestmark = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "use_recursive_dict_tags_for_guards"),
    reason="this torch checks everything",
)
#: models whose calls bring nothing of their own for the attention to read
NAMES = ("toy", "bloom", "gpt2")


@pytest.fixture(autouse=True)
def _kernel_anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The way of calls on a card, up to the kernel."""
    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(registration, "launch", lambda spec, tensors, **_: tensors["o"].fill_(1))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
        yield
    torch._dynamo.reset()


class Recorder:
    """A compiler that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(graph)
        return graph.forward


def compiled(name: str) -> tuple[nn.Module, Recorder]:
    """A converted model that has run once as compiled code, and what was compiled."""
    case = CASES[name]
    model, call, recorder = case.make(), case.call(), Recorder()
    patch_model(model, recipes=case.recipes, backend="triton", force_all=True)
    if isinstance(call, dict):
        call.pop("attention_mask")
    run = torch.compile(model, backend=recorder)
    with torch.no_grad():
        run(**call) if isinstance(call, dict) else run(call)
    return model, recorder


def guards_of(function: Any) -> list[str]:
    """Lines of the trees of guards of all code that was compiled for a function's code."""
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    return [line for entry in entries for line in str(entry.guard_manager).splitlines()]


def all_guards() -> list[str]:
    found = {f.__code__: f for f in gc.get_objects() if type(f) is types.FunctionType}
    return [line for function in found.values() for line in guards_of(function)]


@pytest.mark.parametrize("name", NAMES)
def test_a_patched_module_is_passed_over(name: str) -> None:
    model, _ = compiled(name)
    managers = [line for line in all_guards() if "GuardManager: source=" in line]
    below = [line for line in managers if "_modules['score_bias']" in line]
    sites = {re.split(r"\._modules\['score_bias'\]", line.partition("source=")[2])[0]
             for line in below}  # fmt: skip
    assert len(sites) == len(patched_modules(model))
    for site in sites:
        own = [line for line in managers if f"source={site}" in line]
        unsafe = [line for line in own if "tag_safe=(False" in line]
        assert own and not unsafe, "\n".join(unsafe)
        # the module itself is the root of what is passed over, or something around it
        assert any(f"source={site}," in line for line in own)


@pytest.mark.parametrize("name", NAMES)
def test_packed_tensors_stay_where_they_are(name: str) -> None:
    """A CUDA graph would copy, in each call, what is not known to stay."""
    _, recorder = compiled(name)
    packed = [
        node
        for graph in recorder.graphs
        for node in graph.graph.nodes
        if node.op == "placeholder" and "forms" in node.name
    ]
    assert packed
    for node in packed:
        assert node.meta["tensor_dict"]["_dynamo_static_input_type"] == "unguarded", node.name


def test_an_owner_finds_what_something_was_put_around() -> None:
    """Compiled code looks for the attention where calls go by; it may have moved."""
    case = CASES["gpt2"]
    model, call = case.make(), {"input_ids": case.call()["input_ids"]}
    patch_model(model, force_all=True, backend="triton")
    (owner,) = patched_owners(model)
    assert owner._consumer_names.split() == [
        name for name, module in owner.named_modules() if module in patched_modules(model)
    ]
    blocks = owner.h
    blocks[0] = Around(blocks[0])
    with torch.no_grad():
        expected = model(**call).logits
        found = torch.compile(model, backend="eager")(**call).logits
        assert torch.equal(found, expected)
        patched_modules(model)[0].train()
        assert not torch.equal(torch.compile(model, backend="eager")(**call).logits, expected)


class Around(nn.Module):
    """Calls another module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
