"""Language models with ALiBi: which sites are converted, and why others are not."""

from __future__ import annotations

import pytest

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.swap import patched_modules, patched_owners

from .models import make

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_attention_in_both_directions_is_unsupported(name: str) -> None:
    """A bias of the key alone stands for a distance under a causal mask only."""
    model = make(name)
    model.config.is_causal = False
    site = inspect_model(model).sites[0]
    assert site.status == "unsupported" and "both directions" in site.reason


def test_one_layer_left_alone_means_all(name: str) -> None:
    model = make(name)
    sites = [site.name for site in inspect_model(model).sites]
    plan = patch_model(model, exclude=[sites[1]])
    assert [site.status for site in plan.sites] == ["left alone", "left alone"]
    assert f"shares its bias with {sites[1]!r}" in plan.sites[0].reason
    assert not patched_owners(model) and not patched_modules(model)


def test_attention_without_its_model_is_unsupported(name: str) -> None:
    layer = next(m for m in make(name).modules() if type(m).__name__.endswith("Attention"))
    (site,) = inspect_model(layer).sites
    assert site.status == "unsupported" and "not part of this model" in site.reason


def test_a_replaced_forward_of_the_owner_is_respected(name: str) -> None:
    model = make(name)
    decoder = model.get_decoder()
    own = decoder.forward
    decoder.forward = lambda *args, **kwargs: own(*args, **kwargs)
    plan = inspect_model(model)
    assert {site.status for site in plan.sites} == {"unsupported"}
    assert "forward was replaced" in plan.sites[0].reason


def test_falcon_with_rotary_positions_is_left_alone() -> None:
    plan = inspect_model(make("falcon", alibi=False))
    assert {site.status for site in plan.sites} == {"left alone"}
    assert "rotary" in plan.sites[0].reason


def test_bloom_that_emulates_tensor_parallelism_is_unsupported() -> None:
    plan = inspect_model(make("bloom", pretraining_tp=2, slow_but_exact=True))
    assert {site.status for site in plan.sites} == {"unsupported"}


def test_tokens_say_for_what_length_to_plan(name: str) -> None:
    assert inspect_model(make(name), tokens=123).sites[0].n == 123
