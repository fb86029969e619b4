"""What the prober recovers is what the recipes say, up to a constant per row."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import Regions, SiteProbe, inspect_model, patch_model, probe_model
from flashbias_convert.inputs import as_inputs
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.probing.known import Known
from flashbias_convert.terms import ScoreBias
from tests.support import assert_parity

from . import architectures as a

TOKENS = 18
MODELS: dict[str, Callable[[], a.Made]] = {
    "timm SwinV2": a.swinv2,
    "timm Swin": a.swin,
    "timm BEiT": a.beit,
    "timm LeViT": a.levit,
    "timm EfficientFormer": a.efficientformer,
    "transformers Swin": a.swin_of_transformers,
    "transformers Swinv2": a.swinv2_of_transformers,
    "transformers LeViT": a.levit_of_transformers,
    "BLOOM": a.bloom,
    "MPT": a.mpt,
    "Falcon": a.falcon,
    "Pangu": a.pangu,
}


#: biases of every call: made by builders, from the input or from a table
IN_CALLS: dict[str, Callable[[], a.Made]] = {
    "T5": a.t5,
    "MPNet": a.mpnet,
    "Phi-4 audio": a.phi4_audio,
    "BEiT, a shared bias": lambda: a.beit_of_transformers("use_shared_relative_position_bias"),
    "SAM": a.sam,
    "MViTv2": a.mvit,
    "WavLM": a.wavlm,
    "LiLT": a.lilt,
    "LayoutLMv3": a.layoutlmv3,
    "ESMFold": a.esmfold,
}


def from_recipe(model: nn.Module) -> dict[str, ScoreBias]:
    """The exact terms of every site, without masks."""
    plan = inspect_model(model, method="exact", force_all=True, tokens=TOKENS)
    found = {}
    for site in plan.sites:
        assert site.bias is not None, site
        terms = tuple(t for t in site.bias.terms if not isinstance(t, Regions))
        found[site.name] = ScoreBias(terms, site.bias.num_heads)
    return found


def centred(bias: Tensor, causal: bool) -> Tensor:
    """Rows without their mean over the keys that they see; nothing where hidden."""
    n, m = bias.shape[-2:]
    visible = torch.ones(n, m, dtype=torch.bool)
    visible = visible.tril(m - n) if causal else visible
    mean = bias.masked_fill(~visible, 0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    return (bias - mean).masked_fill(~visible, 0)


def dense(terms: ScoreBias, site: SiteProbe, dtype: torch.dtype) -> Tensor:
    written = terms.dense(site.n, site.m, dtype=dtype)
    assert site.bias is not None
    return centred(written, site.causal).expand(site.bias.shape)


@pytest.mark.parametrize("name", MODELS)
def test_recovered_bias_is_that_of_the_recipe(name: str) -> None:
    model, inputs = MODELS[name]()
    plain, truth = from_recipe(model), from_recipe(copy.deepcopy(model).double())
    found = probe_model(model, inputs)
    assert {site.site for site in found.sites} == set(plain)
    for site in found.sites:
        assert site.bias is not None and site.bias.dtype == torch.float32
        actual = centred(site.bias, site.causal)
        assert float(actual.abs().max()) > 0.1  # else zeros would agree with zeros
        assert_parity(
            actual,
            dense(plain[site.name], site, torch.float32),
            dense(truth[site.name], site, torch.float64),
        )


@pytest.mark.parametrize("name", MODELS)
def test_terms_of_the_prober_give_the_recovered_bias(name: str) -> None:
    """Exact ones bit for bit or to rounding, truncated ones as well as the energy says."""
    model, inputs = MODELS[name]()
    for site in probe_model(model, inputs).sites:
        assert site.terms is not None and site.bias is not None
        written = centred(site.terms.dense(site.n, site.m, dtype=torch.float64), site.causal)
        wanted = centred(site.bias.double(), site.causal)
        lost = (written - wanted).square().sum((-1, -2))
        allowed = (1 - 0.99) * wanted.square().sum((-1, -2))
        assert bool((lost <= allowed * (1 + 1e-6)).all()), site


#: what a site says of recipes; all else is found without them, but for notes that name one
OF_RECIPES = ("recipe", "recipe_site", "refused", "notes")


@pytest.mark.parametrize("name", [*MODELS, *IN_CALLS])
def test_nothing_else_depends_on_recipes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any recipe a model's biases are recovered and called the same."""
    model, inputs = (MODELS | IN_CALLS)[name]()
    with_recipes = probe_model(model, inputs)
    assert any(site.recipe for site in with_recipes.sites)
    monkeypatch.setattr(sys.modules[probe_model.__module__], "known_of", lambda *_, **__: Known())
    without = probe_model(model, inputs)
    assert not any(site.recipe for site in without.sites)
    nothing: dict[str, Any] = dict.fromkeys(OF_RECIPES)
    for site, other in zip(with_recipes.sites, without.sites, strict=True):
        assert {**site.to_dict(), **nothing} == {**other.to_dict(), **nothing}
        assert set(other.notes) == {note for note in site.notes if str(site.recipe) not in note}
        assert (site.bias is None) == (other.bias is None)
        assert site.bias is None or torch.equal(site.bias, other.bias)


def biases_of_calls(model: nn.Module, inputs: Any) -> dict[str, list[Tensor]]:
    """What the recipes add in each call of a patched copy, (B, H, N, M), without masks."""
    model = copy.deepcopy(model)
    plan = patch_model(model, method="exact", force_all=True, tokens=TOKENS, backend="eager")
    found: dict[str, list[Tensor]] = {site.name: [] for site in plan.patched}

    def keep(name: str, module: ScoreBiasModule, args: Any, kwargs: dict[str, Any]) -> None:
        asked = {key: kwargs.get(key, ()) for key in ("extra", "without")}
        q, k = args[:2]
        prepared, _ = module.of_call(kwargs.get("built"), **asked)
        bias = prepared.bias.dense(q.shape[-2], k.shape[-2], dtype=q.dtype)
        found[name].append(bias.expand(*q.shape[:-1], k.shape[-2]).flatten(0, -4))

    for name in found:
        terms = model.get_submodule(name).score_bias
        terms.register_forward_pre_hook(functools.partial(keep, name), with_kwargs=True)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    with torch.no_grad():
        batch = next(iter(as_inputs(inputs, model=model).batches))
        batch = batch.to(torch.device("cpu"), dtype)
        model(*batch.args, **batch.kwargs)
    return found


@pytest.mark.parametrize("name", IN_CALLS)
def test_recovered_bias_is_what_the_recipe_adds_in_a_call(name: str) -> None:
    model, inputs = IN_CALLS[name]()
    found = {site.site: site for site in probe_model(model, inputs).biased}
    plain = biases_of_calls(model, inputs)
    truth = biases_of_calls(copy.deepcopy(model).double(), inputs)
    assert {site.recipe_site for site in found.values()} == set(plain)
    for site in found.values():
        assert site.bias is not None and site.recipe_site is not None
        # LiLT attends twice with the same scores, its recipe once
        number = min(int(site.site.partition("#")[2] or 1), len(plain[site.recipe_site])) - 1
        wanted, exact = (each[site.recipe_site][number] for each in (plain, truth))
        actual = site.bias.repeat(len(wanted) // len(site.bias), 1, 1, 1).expand(wanted.shape)
        three = [centred(each, site.causal) for each in (actual, wanted, exact)]
        assert_parity(*three)
        with pytest.raises(AssertionError, match="error"):  # zeros do not agree with it
            assert_parity(three[0].zero_(), *three[1:])
