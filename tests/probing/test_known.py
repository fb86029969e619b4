"""The prober names the recipe of a site, wherever that is, and says why one refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from flashbias_convert import UsageError, inspect_model, probe_model
from flashbias_convert.probing import recipe_text

from . import architectures as a

#: model -> names of its biased sites and of the modules that the recipe replaces
ABOVE: dict[str, tuple[Callable[[], a.Made], str, dict[str, str]]] = {
    "a layer": (a.beit_of_transformers, "transformers_beit", {"layers.1.attention": "layers.1"}),
    "triangles": (
        a.esmfold,
        "transformers_esmfold_triangle",
        {"tri_att_start.mha": "tri_att_start", "tri_att_end.mha": "tri_att_end"},
    ),
}
REFUSED: dict[str, tuple[Callable[[], a.Made], str]] = {
    "DeBERTa": (a.deberta, "transformers_deberta"),
    "XLNet": (a.xlnet, "transformers_relative_shift"),
}


@pytest.mark.parametrize("name", ABOVE)
def test_the_recipe_of_a_module_above(name: str) -> None:
    make, recipe, places = ABOVE[name]
    model, inputs = make()
    found = {site.site: site for site in probe_model(model, inputs).sites}
    planned = {site.name for site in inspect_model(model, force_all=True).patched}
    for site, replaced in places.items():
        assert (found[site].recipe, found[site].recipe_site) == (recipe, replaced)
        assert replaced in planned
        assert f"{recipe} replaces {replaced}, with this in it" in found[site].notes
        assert not found[site].refused


def test_a_recipe_for_the_module_itself() -> None:
    site = probe_model(*a.bloom()).sites[0]
    assert site.recipe_site == site.site and not any("replaces" in note for note in site.notes)


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_of_a_refusal_is_told(name: str) -> None:
    make, recipe = REFUSED[name]
    model, inputs = make()
    found = probe_model(model, inputs)
    reasons = {site.name: site.reason for site in inspect_model(model, force_all=True).sites}
    assert found.biased
    for site in found.biased:
        assert site.recipe is None and site.recipe_site is None
        assert site.refused == f"{recipe}: {reasons[site.name]}"
        assert f"not converted, says the recipe {site.refused}" in site.notes


@pytest.mark.parametrize("name", ["a layer", "DeBERTa"])
def test_no_recipe_is_started_for_what_one_knows(name: str) -> None:
    model, inputs = {**ABOVE, **REFUSED}[name][0]()
    with pytest.raises(UsageError, match="no biased attention without a recipe") as caught:
        recipe_text(probe_model(model, inputs), model)
    assert ("says the recipe" in str(caught.value.hint)) == (name == "DeBERTa")


def test_a_class_that_is_refused_does_not_hide_one_that_nobody_knows() -> None:
    model, inputs = a.deberta()
    found = probe_model(model, inputs)
    (site,) = found.biased
    other = replace(site, module_class="somewhere.Else", refused="")
    assert recipe_text(replace(found, sites=(site, site, other)), model)[1] == "somewhere.Else"


def test_a_forward_of_its_own_is_a_reason() -> None:
    model, inputs = a.beit_of_transformers()
    base = type(model.layers[0])

    class Other(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
            out: torch.Tensor = super().forward(*args, **kwargs)
            return out

    model.layers[0].__class__ = Other
    assert isinstance(model.layers[0], nn.Module)
    site = probe_model(model, inputs).biased[0]
    assert site.recipe is None and "Other overrides the forward" in site.refused
