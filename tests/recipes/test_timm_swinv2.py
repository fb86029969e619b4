"""timm's SwinV2, patched, against the original: every mask and quirk, with random weights."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import Plan, inspect_model, patch_model, patched, unpatch_model
from flashbias_convert import masks as masks_module
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.recipes.timm_swinv2 import SwinV2WindowAttention
from flashbias_convert.swap import patched_modules
from flashbias_convert.terms import Dense, Regions, ScoreBias
from tests.adapters import Replaced, add_adapters, switch
from tests.support import assert_parity
from tests.timm_abilities import CUTS_ANY_MAP, needs, works

swin = pytest.importorskip("timm.models.swin_transformer_v2")


def randomise(model: nn.Module) -> None:
    """Weights at which the bias, the scales and the attention itself all matter.

    As built, the norms after the attention are zero, the bias is flat and all heads are alike.
    """
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
        if isinstance(module, swin.WindowAttention):
            nn.init.normal_(module.cpb_mlp[0].weight)
            nn.init.normal_(module.cpb_mlp[0].bias)
            nn.init.normal_(module.cpb_mlp[2].weight, 0, 0.1)
            nn.init.uniform_(module.logit_scale, 0.5, 5.0)  # on both sides of the clamp
            nn.init.normal_(module.qkv.weight, 0, 0.2)
            if module.q_bias is not None:
                nn.init.normal_(module.q_bias)
                nn.init.normal_(module.v_bias)


def make(separate: bool = False, **changes: Any) -> Any:
    """A small model in eval mode: windows of 8 on maps of 16 and 8, one of them shifted."""
    arguments: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": (2, 1),
        "num_heads": (2, 4),
        "window_size": 8,
        "num_classes": 5,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = swin.SwinTransformerV2(**{**arguments, **changes})
        randomise(model)
    for module in model.modules():
        if isinstance(module, swin.WindowAttention):
            module.qkv_bias_separate = separate
    return model.eval()


def image(height: int = 32, width: int = 32, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, height, width, generator=generator)


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    """Features (B, h, w, C): many more numbers than logits, and errors of theirs stand out."""
    out: Tensor = model.forward_features(x)  # type: ignore[operator]
    return out


def true_output(model: nn.Module, x: Tensor) -> Tensor:
    """What the original computes in float64 from the same weights and buffers."""
    wide = copy.deepcopy(model)
    unpatch_model(wide)
    return run(wide.double(), x.double())


def patch(model: nn.Module, **options: Any) -> Plan:
    return patch_model(model, **{"method": "exact", "backend": "sdpa", **options})


def check_model(model: nn.Module, x: Tensor, **options: Any) -> Plan:
    """Patch the model and compare it with itself before."""
    plain, truth = run(model, x), true_output(model, x)
    plan = patch(model, **options)
    assert plan.counts() == {"patched": len(plan.sites)}
    assert_parity(run(model, x), plain, truth)
    return plan


# -- whole models --------------------------------------------------------------------------

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
    table = site.bias.terms[0].tensors()["table"]
    assert table.shape == (2, 7 * 15)


def test_half_precision_is_as_good_as_the_original() -> None:
    model = make().bfloat16()
    plan = check_model(model, image().bfloat16())
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
    assert_parity(run(model, x), run(plain, x), true_output(model, x))


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


# -- the comparison notices what goes wrong --------------------------------------------------


def drop_mask(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q, k, v, None, kw


def wrong_scale(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q, k, v, mask, {**kw, "scale": kw["scale"] * 1.001}


def no_cosine(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q, k, v, mask, {**kw, "cosine": False}


def swapped(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return k, q, v, mask, kw


@pytest.mark.parametrize("fault", [drop_mask, wrong_scale, no_cosine, swapped])
def test_a_broken_forward_fails_the_comparison(
    fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = masks_module.attend_windows

    def broken(terms: Any, *args: Any, **kwargs: Any) -> Tensor:
        *changed, keywords = fault(*args, **kwargs)
        return right(terms, *changed, **keywords)

    monkeypatch.setattr("flashbias_convert.recipes.timm_swinv2.attend_windows", broken)
    with pytest.raises(AssertionError, match="error"):
        check_model(make(), image())


def test_a_missing_bias_fails_the_comparison() -> None:
    model = make()
    plain, truth = run(model, image()), true_output(model, image())
    patch(model)
    for name, buffer in model.named_buffers():
        if name.endswith("relative_table.table"):
            buffer.zero_()
    with pytest.raises(AssertionError, match="error"):
        assert_parity(run(model, image()), plain, truth)


# -- one module ----------------------------------------------------------------------------


def shifted_block(**changes: Any) -> tuple[Any, Any, Any]:
    """A model, its shifted block, and that block's attention."""
    model = make(**changes)
    block = model.layers[0].blocks[1]
    assert any(block.shift_size)
    return model, block, block.attn


def window_tokens(windows: int = 8, tokens: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(windows, tokens, 32, generator=generator)


def check_attention(attn: Any, mask: Tensor | None, rows: Any = slice(None)) -> None:
    """Compare a patched attention with its original on the given windows of 8."""
    x = window_tokens()
    plain = copy.deepcopy(attn)
    unpatch_model(plain)
    with torch.no_grad():
        truth = copy.deepcopy(plain).double()(x.double(), None if mask is None else mask.double())
        assert_parity(attn(x, mask)[rows], plain(x, mask)[rows], truth[rows])


def test_the_extracted_bias_is_what_the_original_adds() -> None:
    model, _, attn = shifted_block(pretrained_window_sizes=(6, 6))
    site = inspect_model(model, method="exact").sites[1]
    assert site.bias is not None
    x = window_tokens()
    seen: list[Tensor] = []
    attn.softmax.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        attn(x)
        attn.logit_scale.fill_(-torch.inf)  # leaves the bias alone
        attn(x)
    assert torch.equal(site.bias.select_heads([0, 1]).terms[0].dense(64, 64), seen[1][0])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("arguments", [{}, {"qkv_bias": False}, {"separate": True}])
def test_q_and_k_are_the_originals_bit_for_bit_and_nothing_is_copied(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attn = make(**arguments).bfloat16().layers[0].blocks[0].attn
    x = window_tokens().bfloat16()
    theirs: list[Tensor] = []
    ours: list[Tensor] = []
    right = masks_module.attend_windows

    def recorded(terms: Any, *qkv: Any, **kwargs: Any) -> Tensor:
        ours.extend(qkv[:3])
        return right(terms, *qkv, **kwargs)

    monkeypatch.setattr("flashbias_convert.recipes.timm_swinv2.attend_windows", recorded)
    with torch.no_grad():
        normalize = nn.functional.normalize
        with monkeypatch.context() as context:
            context.setattr(
                nn.functional, "normalize", lambda t, **kw: theirs.append(t) or normalize(t, **kw)
            )
            attn(x)
        patch(attn)
        attn(x)
    assert len(theirs) == 2 and len(ours) == 3
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert len({t.untyped_storage().data_ptr() for t in ours}) == 1


def test_the_windows_that_the_shift_mask_affects_are_right() -> None:
    model, block, attn = shifted_block()
    patch(model)
    mask = block.attn_mask
    affected = mask.flatten(1).any(1).nonzero().flatten()
    assert len(affected) == 3 and len(mask) == 4
    rows = torch.cat([affected, affected + 4])
    check_attention(attn, mask, rows)
    with pytest.raises(AssertionError, match="error"):
        x = window_tokens()
        with torch.no_grad():
            wide = copy.deepcopy(attn)
            unpatch_model(wide)
            masked = wide(x, mask)[rows]
            truth = wide.double()(x.double(), mask.double())[rows]
            assert_parity(attn(x)[rows], masked, truth)


def test_masks_of_neighbouring_images_are_not_mixed_up() -> None:
    model, block, attn = shifted_block()
    patch(model)
    x = window_tokens(12)
    with torch.no_grad():
        together = attn(x, block.attn_mask)
        apart = torch.cat([attn(part, block.attn_mask) for part in x.split(4)])
    assert torch.allclose(together, apart, atol=1e-6)


def test_a_mask_that_differs_from_the_planned_one_is_used_as_it_comes() -> None:
    model, block, attn = shifted_block()
    patch(model)
    check_attention(attn, block.attn_mask)
    check_attention(attn, block.attn_mask.flip(0))
    check_attention(attn, block.attn_mask / 50)
    check_attention(attn, torch.randn(4, 64, 64))
    check_attention(attn, block.attn_mask[:2])
    check_attention(attn, block.attn_mask)


def test_without_a_mask_the_planned_one_is_left_out() -> None:
    model, _, attn = shifted_block()
    patch(model)
    assert attn.score_bias.planned_regions() is not None
    check_attention(attn, None)


def test_a_mask_where_none_was_planned_is_used() -> None:
    model, block, _ = shifted_block()
    patch(model)
    unshifted = model.layers[0].blocks[0].attn
    assert unshifted.score_bias.planned_regions() is None
    check_attention(unshifted, block.attn_mask)


def test_a_mask_that_is_changed_in_place_is_looked_at_again() -> None:
    model, block, attn = shifted_block()
    patch(model)
    check_attention(attn, block.attn_mask)
    block.attn_mask.copy_(block.attn_mask.flip(0))
    check_attention(attn, block.attn_mask)


def test_a_mask_is_compared_once_per_object(monkeypatch: pytest.MonkeyPatch) -> None:
    model, block, attn = shifted_block()
    patch(model, backend="sdpa", method="svd", energy=0.99)
    compared = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *args: compared.append(1) or equal(*args))
    with torch.no_grad():
        for _ in range(3):
            attn(window_tokens(), block.attn_mask)
        assert len(compared) == 1
        attn(window_tokens(), block.attn_mask.clone())
        assert len(compared) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_model_that_has_seen_masks_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    model = make()
    patch(model)
    expected = run(model, image())
    twin = duplicate(model)
    assert torch.equal(run(twin, image()), expected)
    twin.layers[0].blocks[1].attn_mask.zero_()
    assert not torch.equal(run(twin, image()), expected)
    assert torch.equal(run(model, image()), expected)


def test_a_mask_of_another_form_stays_dense_and_is_told() -> None:
    model, block, attn = shifted_block()
    block.attn_mask.copy_(torch.randn(4, 64, 64))
    x = image()
    plain, truth = run(model, x), true_output(model, x)
    plan = patch(model)
    assert attn.score_bias.planned_regions() is None
    assert any("dense term" in warning for warning in plan.sites[1].warnings)
    assert_parity(run(model, x), plain, truth)


def test_the_planned_mask_takes_the_form_of_regions() -> None:
    model, block, attn = shifted_block()
    patch(model)
    term = attn.score_bias.planned_regions()
    assert isinstance(term, Regions) and term.ids.shape == (4, 64)
    assert torch.equal(term.dense(64, 64).squeeze(1), block.attn_mask)
    assert not any(isinstance(term, Dense) for term in attn.score_bias.bias.terms)


def test_subclasses_are_patched() -> None:
    class Mine(swin.WindowAttention):  # type: ignore[misc, name-defined]
        pass

    model, _, attn = shifted_block()
    attn.__class__ = Mine
    check_model(model, image())
    assert isinstance(attn, SwinV2WindowAttention)
    unpatch_model(model)
    assert type(attn) is Mine


# -- parts that others have replaced -------------------------------------------------------


def check_both_ways(model: nn.Module) -> None:
    """Compare with the original, adapters on and off; they matter."""
    plain = copy.deepcopy(model)
    patch(model)
    outs = []
    for enabled in (True, False):
        switch(model, enabled)
        switch(plain, enabled)
        outs.append(run(plain, image()))
        assert_parity(run(model, image()), outs[-1], true_output(plain, image()))
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
    assert_parity(run(model, image()), plain, truth)


# -- changes after patching ----------------------------------------------------------------


def test_training_equals_the_original_with_gradients_to_the_bias() -> None:
    model = make(drop_path_rate=0.2, attn_drop_rate=0.1, proj_drop_rate=0.1).train()
    reference = copy.deepcopy(model)
    patch(model)
    for each in (model, reference):
        torch.manual_seed(4)
        each(image()).square().sum().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, theirs[name].grad), name
    assert float(model.layers[0].blocks[0].attn.cpb_mlp[2].weight.grad.abs().max()) > 0


@pytest.mark.filterwarnings("ignore:a converted attention module runs in eval mode")
def test_gradients_in_eval_mode_reach_all_but_the_bias() -> None:
    model = make()
    reference = copy.deepcopy(model)
    patch(model)
    for each in (model, reference):
        each(image()).square().sum().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if "cpb_mlp" in name:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, name
        largest = float(theirs[name].grad.abs().max())
        assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4 * largest)


def test_scores_are_bounded_by_scale_and_bias() -> None:
    model = make()
    patch(model, method="svd", energy=0.9, max_attention_error=1.0)
    for attn in patched_modules(model):
        assert isinstance(attn, SwinV2WindowAttention)
        largest = attn.logit_scale.clamp(max=math.log(100)).exp().max()
        dense = ScoreBias(
            tuple(t for t in attn.score_bias.bias.terms if not isinstance(t, Regions)),
            attn.num_heads,
        ).dense(64, 64)
        bound = attn.score_bias.score_bound
        assert bound is not None
        assert largest + dense.abs().max() <= bound <= 1.03 * (largest + dense.abs().max())


def test_a_changed_logit_scale_is_noticed() -> None:
    model = make()
    patch(model)
    with torch.no_grad():
        model.layers[0].blocks[1].attn.logit_scale.add_(0.7)
    with pytest.raises(StaleTermsError):
        run(model, image())


def change_weights(model: Any) -> None:
    state = make().state_dict()
    model.load_state_dict({k: v * 1.1 for k, v in state.items()}, strict=False)


def change_window(model: Any) -> None:
    model.set_input_size(img_size=(32, 32), window_size=4)


def change_one_window(model: Any) -> None:
    model.layers[0].blocks[0].attn.set_window_size((4, 16))


def change_pretrained_window(model: Any) -> None:
    model.layers[0].blocks[0].attn.pretrained_window_size = (4, 4)


@pytest.mark.parametrize(
    "change", [change_weights, change_window, change_one_window, change_pretrained_window]
)
def test_terms_of_another_bias_are_refused(change: Callable[[Any], None]) -> None:
    model = make()
    patch(model)
    change(model)
    with pytest.raises(StaleTermsError, match="WindowAttention have changed"):
        run(model, image())


def test_a_new_window_works_after_patching_again() -> None:
    model = make()
    patch(model)
    model.set_input_size(img_size=(48, 48), window_size=6)
    unpatch_model(model)
    check_model(model, image(48, 48))


@pytest.mark.parametrize("size", [(64, 32), (48, 48), (16, 64)])
def test_the_same_window_on_another_map_needs_no_new_terms(size: tuple[int, int]) -> None:
    model = make(always_partition=True)
    patch(model)
    model.set_input_size(img_size=size, window_size=8, always_partition=True)
    x = image(*size)
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    assert_parity(run(model, x), run(plain, x), true_output(plain, x))


# -- buffers that no checkpoint holds ------------------------------------------------------


def garbage_index(attn: Any) -> None:
    attn.relative_position_index.fill_(4595887523461469503)


def zero_index(attn: Any) -> None:
    attn.relative_position_index.zero_()


def garbage_table(attn: Any) -> None:
    attn.relative_coords_table.fill_(float("nan"))


def zero_table(attn: Any) -> None:
    attn.relative_coords_table.zero_()


@pytest.mark.parametrize("spoil", [garbage_index, zero_index, garbage_table, zero_table])
def test_garbage_in_the_position_buffers_is_refused(spoil: Callable[[Any], None]) -> None:
    model, _, attn = shifted_block()
    spoil(attn)
    plan = inspect_model(model, method="exact")
    assert [site.status for site in plan.sites] == ["patched", "unsupported", "patched"]
    assert "init_non_persistent_buffers" in plan.sites[1].reason
    attn.init_non_persistent_buffers()
    assert inspect_model(model, method="exact").sites[1].status == "patched"


def test_a_model_made_on_the_meta_device_and_filled() -> None:
    with torch.device("meta"):
        model = swin.SwinTransformerV2(
            img_size=32, patch_size=2, embed_dim=32, depths=(2, 1), num_heads=(2, 4),
            window_size=8, num_classes=5,
        )  # fmt: skip
    source = make()
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    for buffer in model.buffers():
        buffer.fill_(3)  # memory may hold by chance what a model before this one had there
    plan = inspect_model(model, method="exact")
    assert {site.status for site in plan.sites} == {"unsupported"}
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    check_model(model.eval(), image())


def test_weights_that_are_not_numbers_fail_their_site() -> None:
    model, _, attn = shifted_block()
    with torch.no_grad():
        attn.cpb_mlp[0].weight[3] = float("nan")
    plan = patch(model)
    assert [site.status for site in plan.sites] == ["patched", "failed", "patched"]
    assert type(attn) is swin.WindowAttention


def test_a_zero_key_stays_finite_where_the_original_does_not() -> None:
    # padded tokens are zero and keys have no bias; in fp16 the original divides zero by zero
    model = make(img_size=36, window_size=7, depths=(1, 1), qkv_bias=False).half()
    attn = model.layers[0].blocks[0].attn
    x = torch.zeros(4, 49, 32, dtype=torch.float16)
    x[:, :20] = torch.randn(4, 20, 32, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        plain = attn(x)
        patch(model)
        assert attn(x).isfinite().all()
    with pytest.raises(AssertionError, match="plain has values that are not finite"):
        assert_parity(plain, plain, plain.nan_to_num().double())
