"""Real architectures whose terms are trained: cosine attention in windows, and ALiBi."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import patch_model, unpatch_model
from flashbias_convert.errors import UsageError
from flashbias_convert.swap import patched_modules, patched_owners
from tests.support import assert_parity

pytest.importorskip("timm")
pytest.importorskip("transformers")

from tests.models.test_alibi_gpt2 import make as make_gpt2
from tests.models.test_alibi_gpt2 import tokens
from tests.recipes.timm_swinv2.models import image
from tests.recipes.timm_swinv2.models import make as make_swin


def gradients(model: Any, *names: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Gradients of parameters whose names end so, of a training step of a SwinV2."""
    wanted = {n: p for n, p in model.named_parameters() if n.endswith(names)}
    loss = model(image().to(dtype)).square().sum()
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_swinv2_trains_its_tables_and_all_the_rest(backend: str) -> None:
    """Exact terms: everything but the bias has the gradients of the original."""
    plain = make_swin(drop_path_rate=0.0)
    wide = copy.deepcopy(plain).double()
    model = copy.deepcopy(plain)
    patch_model(model, train="terms", method="exact", force_all=True, backend=backend)
    for each in (plain, wide, model):
        each.train()
    names = ("logit_scale", "qkv.weight", "proj.weight", "head.fc.weight")
    found, expected = gradients(model, *names), gradients(plain, *names)
    truth = gradients(wide, *names, dtype=torch.float64)
    assert len(found) == 11
    # as one vector: what two numbers of a scale lose to cancellation is luck
    assert_parity(*(torch.cat([g.flatten() for g in each.values()])
                    for each in (found, expected, truth)))  # fmt: skip
    assert all(torch.allclose(found[n], expected[n], rtol=1e-3, atol=1e-6) for n in found)
    tables = gradients(model, "relative_table.table")
    assert len(tables) == 3 and all(table.any() for table in tables.values())
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".cpb_mlp." in n)


def test_a_swinv2_whose_scales_were_trained_is_not_stale() -> None:
    model = make_swin()
    patch_model(model, train="terms", method="svd", energy=0.9, force_all=True, backend="sdpa")
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model(image()).square().sum().backward()
    optimizer.step()
    model.eval()
    other = make_swin()
    patch_model(other, train="terms", method="svd", energy=0.9, force_all=True, backend="sdpa")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(image()), other(image()))
    assert all(module.score_bias.score_bound is None for module in patched_modules(model))


def test_the_owner_of_alibi_stays_lean_in_training() -> None:
    n = 64
    model: Any = make_gpt2(torch.float32, n_positions=n)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = tokens(n=n)
    plain = copy.deepcopy(model).train()
    patch_model(model, train="terms", backend="sdpa", tokens=n, force_all=True)
    model.train()
    wide = copy.deepcopy(plain).double()
    outs = [each(ids).logits for each in (model, plain, wide)]
    assert_parity(*(out.detach() for out in outs))
    outs[0].square().sum().backward()
    slopes = {name: p for name, p in model.named_parameters() if name.endswith("alibi.slopes")}
    assert len(slopes) == 3 and all(p.grad.any() for p in slopes.values())
    assert len(patched_owners(model)) > 0


def test_the_sites_of_an_owner_train_together() -> None:
    from flashbias_convert import apply_plan, inspect_model

    model: Any = make_gpt2(torch.float32, attn_pdrop=0.0)
    plan = inspect_model(model, force_all=True, tokens=16)
    other = copy.deepcopy(plan)
    apply_plan(model, plan, train="terms")
    unpatch_model(model, discard_trained=True)
    plan.sites[1] = other.sites[1]
    with pytest.raises(UsageError, match="only be trained together"):
        apply_plan(model, plan)
    assert not patched_modules(model)
