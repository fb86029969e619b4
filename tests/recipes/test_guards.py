"""What compiled code checks in each call: next to nothing of a patched module that nobody touched.

torch.compile passes over a module whose dictionaries are what they were, if nothing but modules,
dictionaries, tensors, numbers and strings was read of it: such a one is "tag safe" in the tree of
guards. On a card a language model decodes a token in less time than it takes to check the others.
"""

from __future__ import annotations

import copy
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
from flashbias_convert.patched_attention import PatchedAttention
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
        unsafe = [line for line in own if "tag_safe=(True" not in line]
        assert own and not unsafe, "\n".join(unsafe)
        # it is the root of what is passed over, or something around it is
        (itself,) = [line for line in own if f"source={site}," in line]
        around = [
            line for line in managers
            if "tag_safe=(True, True)" in line
            and site.startswith(line.partition("source=")[2].partition(", ")[0])
        ]  # fmt: skip
        assert "tag_safe=(True, True)" in itself or around


def own_guards(model: nn.Module, function: Any, site: str) -> list[str]:
    """Guards that name something of one site, of the code of a function."""
    bare = (line.partition("  #")[0] for line in guards_of(function))
    return [line for line in bare if site in line]


def test_a_site_of_gpt2_has_not_many_guards() -> None:
    """115 with torch 2.14; of the modules in it, of which most are, the original has as many."""
    model, _ = compiled("gpt2")
    found = own_guards(model, type(model).forward, "['h']._modules['1']._modules['attn']")
    assert 20 < len(found) < 130, "\n".join(found)
    # whatever else there is would be checked for each layer, once more
    assert not [line for line in found if "_consumers" in line or "keys(" in line]
    assert not [line for line in found if "__kwdefaults__" in line or "__mro__" in line]


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


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["toy", "gpt2"])
def test_an_export_leaves_a_model_that_compiles(name: str, strict: bool) -> None:
    """torch.export puts copies in the place of all dictionaries of modules."""
    case = CASES[name]
    model, call = case.make(), case.call()
    patch_model(model, recipes=case.recipes, backend="triton", force_all=True)
    given: dict[str, Any] = {"args": (call,), "kwargs": {}}
    if isinstance(call, dict):
        given = {"args": (), "kwargs": {"input_ids": call["input_ids"], "use_cache": False}}
    with torch.no_grad():
        expected = model(*given["args"], **given["kwargs"])
        for _ in range(2):
            torch.export.export(model, **given, strict=strict)
        run = torch.compile(model, backend="eager", fullgraph=True)
        found = run(*given["args"], **given["kwargs"])
    assert torch.equal(*(getattr(out, "logits", out) for out in (found, expected)))


def test_another_model_that_is_patched_compiles_nothing_anew() -> None:
    model, recorder = compiled("toy")
    other = CASES["toy"].make()
    other.blocks[0].attn.add_module("more", nn.Identity())
    patch_model(other, recipes=CASES["toy"].recipes, backend="triton", force_all=True)
    before = len(recorder.graphs)
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        torch.compile(model, backend=recorder)(CASES["toy"].call())
    assert len(recorder.graphs) == before


def test_a_pickle_of_an_earlier_release_computes() -> None:
    model = CASES["toy"].make()
    patch_model(model, recipes=CASES["toy"].recipes, backend="eager", force_all=True)
    x = CASES["toy"].call()
    expected = model(x)
    for site in patched_modules(model):
        del site.score_bias.flat, site._child_names
        site.__dict__.pop("_is_broken", None)
    again = copy.deepcopy(model)
    assert torch.equal(again(x), expected)
    assert torch.equal(torch.compile(again, backend="eager")(x), expected)


@pytest.mark.parametrize("name", ["runs_original", "_in_training", "trains_terms"])
def test_what_a_recipe_has_of_its_own_counts(name: str) -> None:
    class Mine(PatchedAttention):
        pass

    assert Mine.composed_methods().keys() == {"runs_original"}
    setattr(Mine, name, lambda self: True)
    assert Mine.composed_methods() == {}


class Around(nn.Module):
    """Calls another module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
