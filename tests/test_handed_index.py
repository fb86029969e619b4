"""An index that comes with a call is compared with the usual one, once per tensor and version."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert.handed_index import HandedIndexAttention
from flashbias_convert.relative_positions import window_index
from flashbias_convert.swap import patch_module, unpatch_module
from flashbias_convert.terms import Dense, ScoreBias
from tests.toy import BiasedAttention


class Handed(HandedIndexAttention):
    looks = 0

    def usual_index(self) -> Tensor:
        type(self).looks += 1
        return window_index((2, 3))

    def bias_sources(self) -> tuple[Tensor, ...]:
        return ()


@pytest.fixture
def module() -> Any:
    made = BiasedAttention(tokens=6).eval()
    term = Dense(bias=made.table.detach())
    patch_module(made, Handed, ScoreBias((term,), num_heads=2))
    type(made).looks = 0
    return made


def looks(module: Any) -> int:
    return int(type(module).looks)


def test_one_tensor_is_looked_at_once(module: Any) -> None:
    index = window_index((2, 3))
    assert module.is_usual(index) and module.is_usual(index) and looks(module) == 1
    assert not module.score_bias.met_another_index
    index[0, 0] = 0
    assert not module.is_usual(index) and not module.is_usual(index) and looks(module) == 2
    assert module.score_bias.met_another_index
    assert module.is_usual(window_index((2, 3)).flatten()), "in any shape"
    index.data = window_index((2, 3))
    assert module.is_usual(index), "the version does not count this"


@pytest.mark.parametrize("other", [window_index((3, 2)), window_index((2, 2)), torch.zeros(0)])
def test_another_index(module: Any, other: Tensor) -> None:
    assert not module.is_usual(other)


def test_new_tensors_in_the_place_of_old_ones_are_looked_at(module: Any) -> None:
    right = window_index((2, 3))
    for _ in range(10):
        assert module.is_usual(right + 0) and not module.is_usual(right + 1)


def test_what_was_met_goes_with_copies_and_not_with_the_terms(module: Any) -> None:
    index = window_index((2, 3))
    module.is_usual(index + 1)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.score_bias.met_another_index and twin.is_usual(index)
    terms = module.score_bias
    unpatch_module(module)
    assert vars(module).keys() == vars(BiasedAttention(tokens=6)).keys()
    patch_module(module, Handed, terms.bias)
    assert not module.score_bias.met_another_index


def test_an_index_of_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        index = window_index((2, 3))
        assert module.is_usual(index) and module.is_usual(index) and looks(module) == 1
