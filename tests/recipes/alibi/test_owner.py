"""Language models with ALiBi: the model that makes the bias, and the attention below it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert import inspect_model, load_model, patched, unpatch_model
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.swap import patched_modules, patched_owners
from tests.adapters import add_adapters, switch
from tests.support import assert_parity

from .models import OWNERS, logits, make, padding, patch, tokens, true_logits

pytest.importorskip("transformers")


def test_owner_and_attention_come_and_go_together(name: str) -> None:
    model, ids = make(name), tokens()
    plain, classes = logits(model, ids), [type(m) for m in model.modules()]
    with patched(model, backend="eager"):
        assert len(patched_owners(model)) == OWNERS[name]
        assert len(patched_modules(model)) == 2
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(logits(model, ids), plain)
    patch(model)
    with patched(model, backend="eager"):
        pass
    assert len(patched_modules(model)) == 2 and patched_owners(model)
    assert unpatch_model(model) == 2
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half().float()])
def test_a_cast_after_patching_rounds_no_slope_and_no_position(
    name: str, cast: Callable[[Any], Any]
) -> None:
    """Half of the tokens are beyond 256, where bfloat16 has no odd positions."""
    ids, mask = tokens(2, 512), padding(2, 512)
    before, after = patch(cast(make(name))), cast(patch(make(name)))
    expected = logits(before, ids, attention_mask=mask)
    assert torch.equal(logits(after, ids, attention_mask=mask), expected)
    slopes = [m.score_bias.bias.terms[0].slopes for m in patched_modules(after)]
    fresh = inspect_model(make(name)).sites[0].bias.terms[0].slopes
    assert slopes and all(torch.equal(own, fresh) for own in slopes)


def test_patching_twice_is_patching_once_and_touches_no_other_model(name: str) -> None:
    model, other, ids, mask = make(name), make(name), tokens(), padding()
    plain = logits(other, ids, attention_mask=mask)
    once = logits(patch(model), ids, attention_mask=mask)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    assert torch.equal(logits(patch(model), ids, attention_mask=mask), once)
    assert list(model.state_dict()) == keys
    assert [type(m).__mro__ for m in model.modules()] == [c.__mro__ for c in classes]
    assert not patched_owners(other) and not patched_modules(other)
    assert torch.equal(logits(other, ids, attention_mask=mask), plain)
    assert not torch.equal(once, plain)


def test_hooks_stay_and_fire_once_per_call(name: str) -> None:
    model, ids, calls = make(name), tokens(), []
    for where, module in model.named_modules():
        if module is model.get_decoder() or type(module).__name__.endswith("Attention"):
            for kind in ("forward_pre", "forward"):
                register = getattr(module, f"register_{kind}_hook")
                register(lambda *_, call=(where, kind): calls.append(call))
    logits(model, ids)
    before = calls.copy()
    assert len(before) == 6
    calls.clear()
    logits(patch(model), ids)
    assert calls == before


def test_adapters_of_the_projections_act_as_in_the_original(name: str) -> None:
    model, ids = make(name), tokens()
    assert add_adapters(model, lambda where: ".attn." in f".{where}" or "attention." in where) == 4
    plain, outs = copy.deepcopy(model), []
    patch(model)
    for enabled in (True, False):
        switch(model, enabled)
        switch(plain, enabled)
        outs.append(logits(plain, ids))
        assert_parity(logits(model, ids), outs[-1], true_logits(plain, ids))
    assert (outs[0] - outs[1]).abs().max() > 0.1


def test_copies_and_pickles_compute_the_same(name: str) -> None:
    model, ids, mask = patch(make(name)), tokens(), padding()
    expected = logits(model, ids, attention_mask=mask)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = {id(m) for m in made.modules()}
        assert all(id(m) in own for owner in patched_owners(made) for m in owner._consumers)
        assert torch.equal(logits(made, ids, attention_mask=mask), expected)


def test_a_folder_converts_and_loads(name: str, tmp_path: Path) -> None:
    model, ids, mask = make(name), tokens(), padding()
    model.save_pretrained(tmp_path / "model")
    done = convert_checkpoint(tmp_path / "model")
    assert done.output == tmp_path / "model.flashbias" and len(done.plan.patched) == 2
    loaded = load_model(done.output, backend="sdpa")
    assert len(patched_owners(loaded)) == OWNERS[name]
    expected = logits(patch(model), ids, attention_mask=mask)
    assert torch.equal(logits(loaded, ids, attention_mask=mask), expected)
    assert torch.equal(
        loaded.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4)
    )
