"""Whole models of timm's SwinV2, patched, against the original with random weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model, patched, unpatch_model
from tests.support import assert_parity
from tests.timm_abilities import CUTS_ANY_MAP, needs, works

from .models import check_model, image, make, nearby, patch, run, true_output

VARIANTS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "square": ({}, (32, 32)),
    "window larger than the map": ({"window_size": 24}, (32, 32)),
    "map is no multiple of the window": ({"img_size": 36, "window_size": 7}, (36, 36)),
    "non-square": ({"img_size": (32, 48), "window_size": (4, 8)}, (32, 48)),
    "a window of its own in each stage": (
        {"img_size": (32, 48), "window_size": ((4, 8), (8, 4))},
        (32, 48),
    ),
    "always partition": ({"always_partition": True, "window_size": 12}, (32, 32)),
    "pretrained window": ({"pretrained_window_sizes": (6, 4)}, (32, 32)),
    "no qkv bias": ({"qkv_bias": False}, (32, 32)),
    "separate qkv bias": ({"separate": True}, (32, 32)),
    "dynamic masks": ({"strict_img_size": False}, (32, 32)),
    "dynamic masks, another size": ({"strict_img_size": False}, (48, 40)),
}
#: what of these older versions of timm cannot build
RECENT = {
    "map is no multiple of the window": CUTS_ANY_MAP,
    "always partition": CUTS_ANY_MAP,
    "a window of its own in each stage": "windows by stage",
}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_patched_model_equals_the_original(variant: str, backend: str) -> None:
    arguments, size = VARIANTS[variant]
    if variant in RECENT:
        needs(works(lambda: make(**arguments)), RECENT[variant])
    check_model(make(**arguments), image(*size), backend=backend)


def test_the_logits_follow() -> None:
    model = make(num_classes=1000)
    x = image(batch=4)
    with torch.no_grad():
        plain, truth = model(x), copy.deepcopy(model).double()(x.double())
        patch(model)
        assert_parity(model(x), plain, truth)


def test_windows_and_terms_differ_between_stages() -> None:
    arguments = {"window_size": 12, "depths": (2, 2)}
    needs(works(lambda: make(**arguments)), CUTS_ANY_MAP)
    plan = check_model(make(**arguments), image())
    assert [(site.n, site.heads) for site in plan.sites] == [(144, 2)] * 2 + [(64, 4)] * 2
    kinds = [site.terms() for site in plan.sites]
    table = ("relative_table",)
    assert kinds == [table, ("relative_table", "regions"), table, table]


def test_non_square_windows_are_not_transposed() -> None:
    model = make(img_size=(32, 48), window_size=(4, 8))
    site = inspect_model(model, method="exact").sites[0]
    assert site.bias is not None and site.n == 32
    term = site.bias.terms[0]
    assert term.tensors()["table"].shape == (2, 7 * 15)  # transposed, it would have as many
    expected = made_by_definition(model.layers[0].blocks[0].attn, (4, 8))
    torch.testing.assert_close(term.dense(32, 32), expected, rtol=1e-5, atol=1e-5)
    turned = expected.view(2, 4, 8, 4, 8).permute(0, 2, 1, 4, 3).reshape(2, 32, 32)
    assert (turned - expected).abs().max() > 0.1


@torch.no_grad()
def made_by_definition(attn: Any, window: tuple[int, int]) -> Tensor:
    """The bias (H, N, N) of two tokens from their rows and columns, without timm's buffers."""
    axes = torch.meshgrid(*(torch.arange(float(side)) for side in window), indexing="ij")
    places = torch.stack(axes, -1).flatten(0, 1)
    off = (places[:, None] - places[None]) / torch.tensor([side - 1.0 for side in window])
    bias: Tensor = attn.cpb_mlp(off.sign() * torch.log2(1 + 8 * off.abs()) / 3)
    return 16 * bias.sigmoid().permute(2, 0, 1)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.bfloat16, "sdpa"), (torch.bfloat16, "eager"), (torch.float16, "eager")],
)
def test_half_precision_is_as_good_as_the_original(dtype: torch.dtype, backend: str) -> None:
    model = make().to(dtype)
    plan = check_model(model, image().to(dtype), backend=backend)
    for site in plan.sites:
        assert any("off by up to" in warning for warning in site.warnings)
        assert site.bias is not None
        assert {t.dtype for _, t in site.bias.named_tensors()} == {torch.float32, torch.int32}


def test_a_model_that_is_cast_after_patching() -> None:
    model = make()
    patch(model)
    model.bfloat16()
    x = image().bfloat16()
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    assert_parity(run(model, x), run(plain, x), true_output(model, x), nearby=nearby(plain, x))


def test_double_precision_is_limited_by_float32_terms_only() -> None:
    model = make()
    plain = run(model, image())
    model.double()
    truth = run(model, image().double())
    patch(model)
    assert_parity(run(model, image().double()).float(), plain, truth)


def test_truncated_terms_come_closer_with_more_energy() -> None:
    model = make()
    plain, errors = run(model, image()), []
    for energy in (0.9, 0.99, 0.9999):
        with patched(
            model, method="svd", energy=energy, max_attention_error=1.0, fill=False, backend="sdpa"
        ) as plan:
            assert {kind for site in plan.sites for kind in site.terms()} >= {"low_rank"}
            errors.append(float((run(model, image()) - plain).abs().max()))
    assert errors[0] > errors[1] > errors[2] > 0


def test_autocast() -> None:
    model = make()
    truth = true_output(model, image())
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(model, image())
        patch(model)
        actual = run(model, image())
    assert actual.dtype == plain.dtype == torch.bfloat16
    assert_parity(actual, plain, truth)


@pytest.mark.parametrize("strict", [True, False])
def test_a_patched_model_compiles_into_one_graph(strict: bool) -> None:
    model = make(strict_img_size=strict)
    patch(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        out = compiled(image())
        assert torch.equal(out, model(image()))
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(image()), out)


def test_a_compiled_model_does_not_trust_a_mask_after_its_input_size_changed() -> None:
    model = make(img_size=(48, 32))
    patch(model)
    model.set_input_size(img_size=(32, 48), window_size=8)  # as many windows, other masks
    model = copy.deepcopy(model).to(torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    x = image(32, 48)
    with torch.no_grad():
        truth = copy.deepcopy(plain).double()(x.double())
        assert_parity(compiled(x), plain(x), truth)
