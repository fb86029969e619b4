"""What the prober recovers is what the recipes say, up to a constant per row."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import Regions, SiteProbe, inspect_model, probe_model
from flashbias_convert.terms import ScoreBias
from tests.support import assert_parity

from . import architectures as a

TOKENS = 18
MODELS: dict[str, Callable[[], a.Made]] = {
    "timm SwinV2": a.swinv2,
    "timm Swin": a.swin,
    "timm BEiT": a.beit,
    "transformers Swin": a.swin_of_transformers,
    "transformers Swinv2": a.swinv2_of_transformers,
    "BLOOM": a.bloom,
    "MPT": a.mpt,
    "Falcon": a.falcon,
    "Pangu": a.pangu,
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
