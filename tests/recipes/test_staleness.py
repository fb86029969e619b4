"""What users do to a converted model: merged adapters, gradient checkpointing, other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import patch_model, unpatch_model
from flashbias_convert.errors import StaleTermsError
from tests.adapters import Adapter, add_adapters
from tests.recipes import test_timm_beit as timm_beit
from tests.recipes import test_timm_rel_pos as timm_rel_pos
from tests.recipes import test_timm_swin as timm_swin
from tests.recipes import test_transformers_beit as beit
from tests.recipes import test_transformers_data2vec as data2vec
from tests.recipes import test_transformers_swin as hf_swin
from tests.recipes import test_transformers_t5_copies as t5
from tests.recipes.parity import Case, original, randomise
from tests.recipes.timm_swinv2 import models as timm_swinv2
from tests.support import assert_parity


def merge(model: nn.Module, *, keep: bool) -> None:
    """Add what adapters do to the weights, behind torch's back, and take the adapters away.

    Args:
        model: has adapters.
        keep: the layer keeps its parameter, whose numbers change in place.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Adapter):
            layer: Any = module.base_layer
            change = (module.down @ module.up).T.detach()
            if keep:
                layer.weight.data += change
            else:
                layer.weight.data = layer.weight.data + change
            model.set_submodule(name, layer)


@pytest.mark.parametrize("keep", [True, False])
def test_adapters_that_are_merged_into_projections(keep: bool) -> None:
    case = timm_swin.BASIC
    model, x = case.model(), case.inputs()
    case.patch(model)
    before = case.output(model, x)
    assert add_adapters(model, lambda name: name.endswith(("attn.qkv", "attn.proj")))
    with_adapters = case.output(model, x)
    merge(model, keep=keep)
    merged = case.output(model, x)
    assert_parity(merged, case.output(original(model), x), case.truth(model, x))
    torch.testing.assert_close(merged, with_adapters, rtol=1e-4, atol=1e-5)
    assert (merged - before).abs().max() > 1e-2


@pytest.mark.parametrize("called", [True, False], ids=["called between", "not called between"])
@pytest.mark.parametrize("keep", [True, False])
def test_adapters_of_the_bias_are_refused_until_they_are_merged_and_patched_again(
    keep: bool, called: bool
) -> None:
    model = timm_swinv2.make()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        randomise(model)
    model.eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {"method": "exact", "backend": "sdpa", "force_all": True}
    patch_model(model, **settings)
    with torch.no_grad():
        before = model(x)
        assert add_adapters(model, lambda name: name.endswith("cpb_mlp.2"))
        if called:
            with pytest.raises(StaleTermsError):
                model(x)
            twin = copy.deepcopy(model)
            assert set(patch_model(twin, **settings).counts()) == {"unsupported"}
        merge(model, keep=keep)
        with pytest.raises(StaleTermsError):
            model(x)
        unpatch_model(model)
        plain, truth = model(x), copy.deepcopy(model).double()(x.double())
        patch_model(model, **settings)
        out = model(x)
    assert_parity(out, plain, truth)
    assert (out - before).abs().max() > 1e-3


# -- gradient checkpointing ----------------------------------------------------------------


def encoder_of_t5() -> Any:
    return t5.make("pop2piano").encoder


def of_tokens(model: Any, _: Tensor) -> Tensor:
    out: Tensor = model(t5.tokens(), attention_mask=t5.padding()).last_hidden_state
    return out


CHECKPOINTED: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "timm Swin": (timm_swin.BASIC.make, timm_swin.features),
    "Swin": (hf_swin.CASES[0].make, hf_swin.CASES[0].run),
    "BEiT": (beit.BOTH.make, beit.last),
    "Data2VecVision": (data2vec.BOTH.make, data2vec.last),
    "T5": (encoder_of_t5, of_tokens),
}


def enable(model: Any) -> None:
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
    else:
        model.gradient_checkpointing_enable()
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing(name: str) -> None:
    """Training goes through the original, recomputed; serving is as without."""
    make, run = CHECKPOINTED[name]
    side = 20 if name in ("BEiT", "Data2VecVision") else 32
    case = Case(name, make, (2, 3, side, side), run)
    model, x = case.model(), case.inputs()
    patch_model(model, backend="sdpa", force_all=True)
    expected, found = case.output(model, x), []
    for change in (lambda _: None, enable):
        change(model)
        model.train().zero_grad()
        torch.manual_seed(5)
        run(model, x).square().mean().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert any("bias" in n and "relative" in n for n in grads)
        found.append(grads)
        model.eval()
        assert torch.equal(case.output(model, x), expected)
    assert found[0].keys() == found[1].keys()
    for parameter, grad in found[0].items():
        torch.testing.assert_close(found[1][parameter], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_compiled_models_notice_another_window_of_as_many_tokens(name: str) -> None:
    """Shapes do not tell, which is all that a graph looks at by itself."""
    timm = pytest.importorskip("timm")
    sizes = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2), "num_classes": 5}
    model = timm.create_model(name, img_size=(48, 48), window_size=(4, 6), **sizes).eval()
    patch_model(model, method="exact", force_all=True, backend="sdpa")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        compiled(x)
        model.set_input_size(img_size=(48, 48), window_size=(6, 4))
        for call in (compiled, model):
            with pytest.raises(StaleTermsError, match="window or input size"):
                call(x)


# -- windows of one attention module, set directly -------------------------------------------------


def another_window(model: Any) -> None:
    model.layers[0].blocks[0].attn.set_window_size((2, 8))


def another_map(model: Any) -> None:
    attn = model.blocks[0].attn
    attn.set_window_size((attn.window_size[0] + 1, attn.window_size[1]))


def another_table(model: Any) -> None:
    """Of the first table of relative positions, alone."""
    table = next(m for m in model.modules() if hasattr(m, "relative_position_bias_table"))
    rows, columns = table.window_size
    table.set_window_size((rows + 1, columns))


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (timm_swin.BASIC, another_window),
        (timm_beit.OWN, another_map),
        (timm_rel_pos.COATNET, another_table),
    ],
    ids=["timm Swin", "timm BEiT", "timm CoAtNet"],
)
def test_a_window_that_is_set_directly_is_refused(
    case: Case, change: Callable[[Any], None]
) -> None:
    model, x = case.model(), case.inputs()
    case.patch(model)
    case.output(model, x)
    change(model)
    with pytest.raises(StaleTermsError, match="window or input size"):
        case.output(model, x)
