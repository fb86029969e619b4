"""Factor networks of attention with pair bias, in a trunk and in a diffusion."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashbias_convert import (
    apply_plan,
    fit_sites,
    unpatch_model,
)
from flashbias_convert.builders import module_entries
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.decompose.pair_forms import PairSite, forms
from flashbias_convert.decompose.pair_times import Pairs
from flashbias_convert.recipe import Registry

from .pair_models import (
    HEADS,
    PAIR,
    SINGLE,
    N,
    boltz,
    in_trunk,
    numbers,
    openfold3,
    padding,
    plain_norms,  # noqa: F401
    protenix,
)


@pytest.mark.parametrize("package", ["boltz1", "boltz2", "protenix", "openfold3"])
def test_in_a_trunk_networks_see_the_tokens_too(package: str) -> None:
    model, inputs = in_trunk(package)
    anything = FitOptions(hidden=8, steps=5, check_every=5, energy=None, max_attention_error=None)
    plan = fit_sites(model, inputs, rank=2, options=anything, from_tokens=1)
    (site,) = plan.patched
    assert site.modules is not None
    networks: Any = site.modules[FactorNetworks.kind]
    assert networks.q_features == networks.k_features == 2 * PAIR + SINGLE
    # networks of Boltz read the pairs as they are, those of the others behind their norm
    pairs = Pairs(PAIR, "norm and linear", normed="boltz" not in package)
    assert site.forms == forms(N, N, PairSite(HEADS, site.head_dim, pairs))
    older = FactorNetworks(2 * PAIR, 2 * PAIR, HEADS, 2, hidden=8)  # of a file from before
    older.initialise(torch.Generator().manual_seed(0))
    for own in (networks, older):
        bias = {"builder_modules": module_entries({FactorNetworks.kind: own})}
        spec = {**(site.spec or {}), **bias}
        chosen = dataclasses.replace(site, spec=spec, modules={FactorNetworks.kind: own})
        apply_plan(model, dataclasses.replace(plan, sites=[chosen]), backend="sdpa")
        with torch.no_grad():
            out = model(**inputs)
            moved = {**inputs, "z": inputs["z"].flip(1)}
            assert out.isfinite().all() and not torch.equal(out, model(**moved))
        unpatch_model(model)


@pytest.mark.parametrize("package", ["boltz1", "boltz2", "protenix", "openfold3"])
def test_in_a_diffusion_they_do_not(package: str) -> None:
    model: Any = {
        "boltz1": boltz(1, 2), "boltz2": boltz(2, 2), "protenix": protenix(True),
        "openfold3": openfold3(diffusion=True),
    }[package].make()  # fmt: skip
    z, tokens = numbers(model, 2, 1, N, N, PAIR), numbers(model, 2, 3, N, SINGLE)
    given: dict[str, Any] = {"a": tokens, "s": numbers(model, 2, 3, N, 6), "z": z}
    if package.startswith("boltz"):  # as its diffusion makes it, with one sample
        setattr(model[0], "initial_norm" if package == "boltz1" else "compute_pair_bias", False)
        given = {"s": tokens[:, 0], "z": z[:, 0], "mask": padding(z)}
        given |= {"k_in": tokens[:, 0]} if package == "boltz2" else {}
    recipe = Registry(()).find(model[0])
    assert recipe is not None and recipe.observe is not None
    with torch.no_grad():
        seen = recipe.observe(model[0], **given)
    assert seen.x_q.shape[-1] == 2 * PAIR
