"""Parts of timm's SwinV2 that others have replaced, such as adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from flashbias_convert import inspect_model
from tests.adapters import Replaced, add_adapters, switch
from tests.support import assert_parity

from .models import image, make, nearby, patch, run, swin, true_output


def check_both_ways(model: nn.Module) -> None:
    """Compare with the original, adapters on and off; they matter."""
    plain = copy.deepcopy(model)
    patch(model)
    outs = []
    for enabled in (True, False):
        switch(model, enabled)
        switch(plain, enabled)
        x = image()
        outs.append(run(plain, x))
        truth = true_output(plain, x)
        assert_parity(run(model, x), outs[-1], truth, nearby=nearby(plain, x))
    assert (outs[0] - outs[1]).abs().max() > 0.1


@pytest.mark.parametrize("separate", [False, True])
def test_adapters_of_the_projections_act_as_in_the_original(separate: bool) -> None:
    """Without `qkv_bias_separate` timm reads the weight of qkv past them; so does the patch."""
    model = make(separate=separate)
    assert add_adapters(model, lambda name: name.endswith(("attn.qkv", "attn.proj"))) == 6
    check_both_ways(model)


def change_attention(attn: Any) -> None:
    attn.proj.weight.mul_(1.5)
    attn.cpb_mlp[2].weight.mul_(-1)


def test_an_attention_beside_a_changed_copy_of_it() -> None:
    model = make()
    for name, module in list(model.named_modules()):
        if type(module) is swin.WindowAttention:
            model.set_submodule(name, Replaced(module, change_attention))
    assert len(inspect_model(model).sites) == 6
    check_both_ways(model)


def test_adapters_of_the_bias_are_refused() -> None:
    """To switch them changes the bias, and nothing that a patched module could look at."""
    model = make()
    assert add_adapters(model, lambda name: name.endswith("blocks.1.attn.cpb_mlp.2")) == 1
    plain, truth = run(model, image()), true_output(model, image())
    plan = patch(model)
    assert [site.status for site in plan.sites] == ["patched", "unsupported", "patched"]
    assert "made by layers such as Adapter; merge adapters" in plan.sites[1].reason
    assert_parity(run(model, image()), plain, truth, nearby=nearby(model, image()))
