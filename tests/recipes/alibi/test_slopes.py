"""Language models with ALiBi: slopes are the model's, and changes of them are noticed."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashbias_convert import check_model, inspect_model, patched, unpatch_model
from flashbias_convert.errors import StaleTermsError
from tests.support import assert_parity

from .models import logits, make, patch, tokens, true_logits

pytest.importorskip("transformers")


def test_slopes_are_those_of_the_model(name: str) -> None:
    model = make(name)
    (term,) = inspect_model(model).sites[0].bias.terms
    expected = {"bloom": [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]}
    expected["mpt"] = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    expected["gpt2"] = expected["bloom"]
    expected["falcon"] = [slope / math.sqrt(8) for slope in expected["bloom"]]
    torch.testing.assert_close(term.slopes, torch.tensor(expected[name]))


def two_part_slopes(heads: int) -> list[float]:
    """Press et al.: those of the next smaller power of two, and every other one of the larger."""
    smaller = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * i / smaller) for i in range(1, smaller + 1)]
    return (first + [2 ** (-4 * i / smaller) for i in range(1, 2 * smaller, 2)])[:heads]


@pytest.mark.parametrize(("heads", "size"), [(6, 64), (12, 8), (40, 8), (50, 8)])
def test_slopes_of_any_number_of_heads_and_of_any_size(name: str, heads: int, size: int) -> None:
    """Falcon divides its bias, rounded to bfloat16, by the root of the size; the others do not."""
    model = make(name)
    attribute = {"bloom": ("hidden_size", "n_head"), "mpt": ("d_model", "n_heads")}
    attribute |= {"falcon": ("hidden_size", "num_attention_heads"), "gpt2": ("n_embd", "n_head")}
    config = copy.deepcopy(model.config)
    for key, value in zip(attribute[name], (heads * size, heads), strict=True):
        setattr(config, key, value)
    (term,) = inspect_model(type(model)(config).eval()).sites[0].bias.terms
    expected = torch.tensor(two_part_slopes(heads))
    rounding = {"rtol": 1e-6, "atol": 0.0}
    if name == "falcon":
        expected, rounding = expected / math.sqrt(size), {"rtol": 2**-8, "atol": 0.0}
    torch.testing.assert_close(term.slopes, expected, **rounding)


def refuse_to_match(model: Any) -> None:
    with pytest.raises(StaleTermsError, match="'transformer'"):
        check_model(model)


@pytest.mark.parametrize("look", [lambda m: m.eval(), refuse_to_match], ids=["eval", "check_model"])
def test_compiled_code_refuses_what_was_found_to_have_changed(look: Callable[[Any], Any]) -> None:
    """Compiled code looks at no number: a look from outside must reach it."""
    torch.compiler.reset()
    model, ids = patch(make("gpt2")), tokens()
    compiled: Any = torch.compile(model, backend="eager")
    expected = logits(compiled, ids)
    look_again = model.eval()
    assert torch.equal(logits(compiled, ids), expected) and look_again is model
    model.get_decoder().slopes.mul_(0.5)
    look(model)
    with pytest.raises(StaleTermsError, match="AlibiGPT2Model makes its bias from has changed"):
        logits(compiled, ids)
    model.get_decoder().slopes.mul_(2.0)
    model.eval()
    assert torch.equal(logits(compiled, ids), expected)


def test_what_was_patched_again_is_fresh_for_compiled_code() -> None:
    torch.compiler.reset()
    model, ids = patch(make("gpt2")), tokens()
    before = set(vars(make("gpt2").get_decoder()))
    model.get_decoder().slopes.mul_(0.5)
    refuse_to_match(model)
    unpatch_model(model)
    assert set(vars(model.get_decoder())) == before
    patch(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(compiled, ids), logits(model, ids))


@pytest.mark.parametrize(
    "renew", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)).double().float()]
)
def test_slopes_that_are_changed_by_hand_are_noticed(renew: Callable[[Any], Any]) -> None:
    """As one does to read beyond the trained length."""
    model, ids = patch(make("gpt2")), tokens()
    expected = logits(model, ids)
    model = renew(model)
    assert torch.equal(logits(model, ids), expected)
    model.get_decoder().slopes.mul_(0.5)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(StaleTermsError, match="AlibiGPT2Model makes its bias from has changed"):
            logits(each, ids)
    with patched(model, backend="eager"):
        logits(model, ids)
    with pytest.raises(StaleTermsError):
        logits(model, ids)
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    assert_parity(logits(patch(model), ids), logits(plain, ids), true_logits(plain, ids))
