"""What can be seen of a site is what the recipe and the terms say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model, patch_model, views
from flashbias_convert.decompose import cumulative_energy, row_center, spectrum
from flashbias_convert.recipe import Description, Site, UnsupportedSite
from flashbias_convert.terms import Alibi
from flashbias_convert.views import SiteView, site_views
from tests.toy import TOY, describe, make_model, make_recipe

OPTIONS: dict[str, Any] = {"recipes": [TOY], "force_all": True}


def seen(**options: Any) -> list[SiteView]:
    model = make_model()
    return list(site_views(model, inspect_model(model, **{**OPTIONS, **options}), [TOY]))


@pytest.mark.parametrize("method", ["exact", "svd"])
def test_bias_terms_and_residual(method: str) -> None:
    model = make_model()
    for view, block in zip(seen(method=method), model.blocks, strict=True):
        bias = row_center(block["attn"].table.detach())
        assert view.bias is not None and view.approximation is not None and view.energy is not None
        assert torch.equal(view.bias, bias) and view.heads == 2
        residual = view.residual()
        assert residual is not None and torch.equal(residual, bias - view.approximation)
        lost = [float(r.square().mean().sqrt()) for r in residual]
        assert lost == pytest.approx([d.logit_error_rms for d in view.site.decisions], abs=1e-6)
        assert torch.allclose(view.energy, cumulative_energy(spectrum(bias)), atol=1e-6)


def test_masks_are_left_out() -> None:
    from tests.checkpoint.models import tiny_model

    model = tiny_model()
    plan = inspect_model(model, force_all=True)
    assert any("regions" in site.terms() for site in plan.sites)
    for view in site_views(model, plan):
        residual = view.residual()
        assert residual is not None and residual.abs().max() < 1  # a mask is 100


def test_a_patched_model_looks_the_same() -> None:
    model = make_model()
    plan = patch_model(model, **OPTIONS)
    for view, before in zip(site_views(model, plan, [TOY]), seen(), strict=True):
        assert view.bias is not None and before.bias is not None
        assert torch.equal(view.bias, before.bias)


def test_a_site_that_is_left_alone_has_no_terms() -> None:
    view = seen(exclude=["blocks.1.attn"])[1]
    assert view.bias is not None and view.approximation is None and view.residual() is None


def test_the_worst_entry_of_a_batch_is_shown() -> None:
    rough = torch.randn(2, 36, 36, generator=torch.Generator().manual_seed(0))

    def batched(site: Site) -> Description:
        found = describe(site)
        assert found.bias is not None
        smooth = torch.outer(torch.arange(36.0), torch.arange(36.0)).expand(2, 36, 36) / 300
        return replace(found, bias=torch.stack([smooth, smooth + rough, smooth]))

    model, recipe = make_model(1), make_recipe(describe=batched)
    options = {"method": "svd", "energy": 0.9, "max_attention_error": 1.0}
    plan = inspect_model(model, recipes=[recipe], force_all=True, **options)
    (view,) = site_views(model, plan, [recipe])
    assert view.note == "entry 1 of a batch of 3" and view.bias is not None
    assert view.bias.shape == (2, 36, 36)


def test_a_closed_form_loses_nothing() -> None:
    def alibi(site: Site) -> Description:
        term = Alibi(slopes=torch.tensor([0.5, 0.25]))
        return replace(describe(site), bias=None, exact_terms=(term,))

    model, recipe = make_model(1), make_recipe(describe=alibi)
    plan = inspect_model(model, recipes=[recipe], force_all=True)
    (view,) = site_views(model, plan, [recipe])
    assert view.note == "closed form, nothing is lost" and view.energy is None
    residual = view.residual()
    assert residual is not None and not residual.any() and view.bias is not None
    assert float(view.bias.abs().max()) > 1


def broken(kind: str) -> Any:
    def describe_badly(site: Site) -> Description:
        if kind == "unsupported":
            raise UnsupportedSite("it is odd")
        found = describe(site)
        assert isinstance(found.bias, Tensor)
        return replace(found, bias=found.bias * float("nan"))

    return describe_badly


@pytest.mark.parametrize(
    ("kind", "note"), [("unsupported", "unsupported: it is odd"), ("nan", "failed: ")]
)
def test_what_cannot_be_seen_is_said(kind: str, note: str) -> None:
    model, recipe = make_model(1), make_recipe(describe=broken(kind))
    plan = inspect_model(model, recipes=[recipe])
    (view,) = site_views(model, plan, [recipe])
    assert view.bias is None and view.heads == 0 and view.note.startswith(note)


def test_what_breaks_later_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(1)
    plan = inspect_model(model, **OPTIONS)
    for kind, note in (("unsupported", "cannot be computed: it is odd"), ("nan", "holds NaN")):
        (view,) = site_views(model, plan, [make_recipe(describe=broken(kind))])
        assert view.bias is None and note in view.note
    monkeypatch.setattr(views, "MAX_CELLS", 2 * 36 * 36 - 1)
    (view,) = site_views(model, plan, [TOY])
    assert view.bias is None and view.note == "36 x 36 is too large to draw"
