"""Pangu-Weather, patched, against itself before: masks shifted and not, with random weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    Plan,
    inspect_model,
    load_model,
    patch_model,
    patched,
    save_model,
    unpatch_model,
)
from flashbias_convert import masks as masks_module
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.models.pangu import EarthAttention3D, earth_position_index
from flashbias_convert.models.pangu.windows import shift_mask
from flashbias_convert.recipe import Registry
from flashbias_convert.recipes.pangu import PanguEarthAttention
from flashbias_convert.terms import Dense, Regions, RelativeTable
from tests.pangu import fields, make, run
from tests.support import assert_parity


def true_output(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """What the original computes in float64 from the same weights."""
    wide = copy.deepcopy(model)
    unpatch_model(wide)
    dtype = next(model.parameters()).dtype
    return run(wide.double(), tuple(x.to(dtype) for x in inputs))


def patch(model: nn.Module, **options: Any) -> Plan:
    return patch_model(model, **{"method": "exact", "backend": "sdpa", **options})


def check_model(model: Any, **options: Any) -> Plan:
    """Patch the model and compare it with itself before."""
    inputs = fields(model)
    plain, truth = run(model, inputs), true_output(model, inputs)
    plan = patch(model, **options)
    assert plan.counts() == {"patched": len(plan.sites)}
    assert_parity(run(model, inputs), plain, truth)
    return plan


def attention(model: Any, layer: int = 0, block: int = 1) -> Any:
    """One attention module; by default a shifted one."""
    return model.layers[layer].blocks[block].attention


# -- whole models --------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "padded maps": {},
    "one window": {"grid": (12, 16), "levels": 2},
    "windows of one level": {"window_size": (1, 3, 4)},
    "published windows": {"window_size": (2, 6, 12), "levels": 3, "grid": (24, 48)},
    "odd longitudes": {"grid": (17, 37)},
}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_patched_model_equals_the_original(
    variant: str, dtype: torch.dtype, backend: str
) -> None:
    check_model(make(**VARIANTS[variant]).to(dtype), backend=backend)


def test_sites_have_the_terms_of_their_blocks() -> None:
    plan = check_model(make())
    assert [site.terms() for site in plan.sites] == [
        ("dense",),
        ("dense", "regions"),
        ("dense",),
        ("dense", "regions"),
        ("dense",),
        ("dense",),
    ]
    assert [(site.n, site.heads, site.head_dim) for site in plan.sites[:3]] == [
        (24, 2, 8),
        (24, 2, 8),
        (24, 4, 8),
    ]


def test_the_terms_are_shared_by_all_longitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    patch(model)
    seen: list[tuple[Any, ...]] = []
    forward = type(attention(model).score_bias).forward

    def recorded(self: Any, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        terms = self.prepared(kwargs.get("without", ())).bias.terms
        seen.append((tuple(q.shape[:-3]), *(t.batch_shape() for t in terms)))
        return forward(self, q, *args, **kwargs)

    monkeypatch.setattr(type(attention(model).score_bias), "forward", recorded)
    run(model, fields(model))
    # fine: 2 fields, 2 windows around the globe, 2 x 2 types; coarse: 1 window around the globe
    assert seen[0] == ((4, 4), (4,)) and seen[1] == ((4, 1, 4), (4,), (1, 4))
    assert seen[2] == ((2, 2), (2,)) and seen[3] == ((2, 1, 2), (2,), (1, 2))


def test_q_k_and_v_are_views_of_one_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    patch(model)
    seen: list[Tensor] = []
    right = masks_module.attend_windows

    def recorded(terms: Any, *qkv: Any, **kwargs: Any) -> Tensor:
        seen.extend(qkv[:3])
        return right(terms, *qkv, **kwargs)

    monkeypatch.setattr("flashbias_convert.recipes.pangu.attend_windows", recorded)
    with torch.no_grad():
        attention(model)(torch.randn(2, 4, 24, 16), None)
    assert len(seen) == 3 and len({t.untyped_storage().data_ptr() for t in seen}) == 1


def test_a_bias_of_the_earth_specific_structure_becomes_a_table() -> None:
    model = make()
    index = earth_position_index((2, 3, 4))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, EarthAttention3D):
                table = torch.randn(module.type_of_windows, module.head_number, 36 * 7)
                module.earth_specific_bias.copy_(table[..., index])
    plan = check_model(model)
    term = plan.sites[1].bias.terms[0]  # type: ignore[union-attr]
    assert isinstance(term, RelativeTable) and term.table.shape == (4, 2, 252)
    assert torch.equal(term.dense(24, 24), attention(model).earth_specific_bias[0])


def test_truncated_terms_come_closer_with_more_energy() -> None:
    model = make()
    plain, errors = run(model, fields(model)), []
    for energy in (0.9, 0.99, 0.9999):
        with patched(
            model, method="svd", energy=energy, max_attention_error=1.0, fill=False, backend="sdpa"
        ) as plan:
            assert {kind for site in plan.sites for kind in site.terms()} == {
                "low_rank",
                "regions",
            }
            errors.append(float((run(model, fields(model)) - plain).abs().max()))
    assert errors[0] > errors[1] > errors[2] > 0


def test_a_rank_serves_all_window_types() -> None:
    model = make()
    bias = attention(model).earth_specific_bias
    with torch.no_grad():
        bias.zero_()
        bias[0, 0, 0] = torch.outer(torch.randn(24), torch.randn(24))
        bias[0, 3, 0] = torch.randn(24, 24)
        bias[0, :, 1] = torch.outer(torch.randn(24), torch.randn(24))
    site = inspect_model(model, method="svd", energy=0.999, fill=False).sites[1]
    assert [d.rank for d in site.decisions][1] == 1
    rank = site.decisions[0].rank
    assert rank is not None and rank > 15  # type 3 needs them, and the others pay for it
    factors = site.bias.terms[0]  # type: ignore[union-attr]
    assert factors.tensors()["phi_q"].shape == (4, 2, 24, rank)


def test_autocast() -> None:
    model = make()
    inputs = fields(model)
    truth = true_output(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(model, inputs)
        patch(model)
        assert_parity(run(model, inputs), plain, truth)


def test_a_patched_model_compiles_into_one_graph() -> None:
    model = make()
    patch(model)
    expected = run(model, fields(model))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(run(compiled, fields(model)), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(run(compiled, fields(model)), expected)


@pytest.mark.parametrize("first", [True, False], ids=["cast first", "patched first"])
def test_a_model_that_is_cast_compiles_once(first: bool) -> None:
    """Without a call in eager mode, which would have made the masks anew."""
    model = make()
    for change in (lambda: model.to(torch.bfloat16), lambda: patch(model))[:: 1 if first else -1]:
        change()
    inputs = [each.to(torch.bfloat16) for each in fields(model)]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = run(compiled, inputs)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(run(compiled, inputs), found)
    assert torch.equal(run(model, inputs), found)


# -- the comparison notices what goes wrong --------------------------------------------------


def drop_mask(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q, k, v, None, kw


def no_scale(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q, k, v, mask, {**kw, "scale": 1.0}


def swapped(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return k, q, v, mask, kw


def neighbouring_heads(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Any, ...]:
    return q.flip(2), k.flip(2), v.flip(2), mask, kw


@pytest.mark.parametrize("fault", [drop_mask, no_scale, swapped, neighbouring_heads])
def test_a_broken_forward_fails_the_comparison(
    fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = masks_module.attend_windows

    def broken(terms: Any, *args: Any, **kwargs: Any) -> Tensor:
        *changed, keywords = fault(*args, **kwargs)
        return right(terms, *changed, **keywords)

    monkeypatch.setattr("flashbias_convert.recipes.pangu.attend_windows", broken)
    with pytest.raises(AssertionError, match="error"):
        check_model(make())


def test_biases_of_exchanged_window_types_fail_the_comparison() -> None:
    model = make()
    inputs = fields(model)
    plain, truth = run(model, inputs), true_output(model, inputs)
    patch(model)
    for name, buffer in model.named_buffers():
        if name.endswith("dense.bias"):
            buffer.copy_(buffer.flip(0))
    with pytest.raises(AssertionError, match="error"):
        assert_parity(run(model, inputs), plain, truth)


# -- one module ----------------------------------------------------------------------------


def check_attention(attn: Any, mask: Tensor | None, windows: int = 6) -> None:
    """Compare a patched attention with its original on windows of 24 tokens, 4 types."""
    x = torch.randn(windows, 4, 24, 16, generator=torch.Generator().manual_seed(2))
    plain = copy.deepcopy(attn)
    unpatch_model(plain)
    with torch.no_grad():
        wide = copy.deepcopy(plain).double()
        truth = wide(x.double(), None if mask is None else mask.double())
        assert_parity(attn(x, mask), plain(x, mask), truth)


def shifted() -> tuple[Any, Tensor]:
    """A patched shifted attention, and the mask that its block passes."""
    model = make()
    patch(model)
    mask = model.layers[0].blocks[1].mask_for(torch.device("cpu"), torch.float32)
    return attention(model), mask


def test_a_mask_that_differs_from_the_planned_one_is_used_as_it_comes() -> None:
    attn, mask = shifted()
    for other in (
        mask,
        mask.expand(2, -1, -1, -1),  # as pangu-pytorch passes it, one for each longitude
        mask.expand(3, -1, -1, -1).clone(),
        torch.cat([mask, mask.flip(1)]),
        mask / 50,
        torch.randn(3, 4, 24, 24),
        mask,
    ):
        check_attention(attn, other)


def test_only_a_mask_that_is_planned_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    attn, mask = shifted()
    term = attn.score_bias.planned_regions()
    assert isinstance(term, Regions) and term.ids.shape == (1, 4, 24)
    assert torch.equal(term.dense(24, 24).squeeze(2), mask)
    extra: list[bool] = []
    forward = type(attn.score_bias).forward

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        extra.append(bool(kwargs.get("extra")))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(attn.score_bias), "forward", recorded)
    x = torch.randn(6, 4, 24, 16)
    with torch.no_grad():
        for other in (mask, mask.expand(3, -1, -1, -1), torch.cat([mask, mask.flip(1)])):
            attn(x, other)
    assert extra == [False, False, True]


def test_without_a_mask_the_planned_one_is_left_out() -> None:
    attn, _ = shifted()
    check_attention(attn, None)


def test_a_mask_where_none_was_planned_is_used() -> None:
    model = make()
    patch(model)
    unshifted = attention(model, block=0)
    assert unshifted.score_bias.planned_regions() is None
    check_attention(unshifted, shift_mask((4, 6, 8), (2, 3, 4)))


def test_a_module_without_its_block_is_patched_too() -> None:
    attn = copy.deepcopy(attention(make()))
    plan = patch(attn)
    assert [site.terms() for site in plan.sites] == [("dense",)]
    check_attention(attn, shift_mask((4, 6, 8), (2, 3, 4)))


# -- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"method": "exact"}, {"method": "svd", "energy": 0.999}])
def test_a_converted_file_computes_what_the_patched_model_does(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = make()
    patch(model, **options, max_attention_error=1.0)
    expected = run(model, fields(model))
    file = tmp_path / "pangu.safetensors"
    save_model(model, file, arch=make)
    loaded = load_model(file, arch=make, backend="sdpa")
    assert isinstance(attention(loaded), PanguEarthAttention)
    assert torch.equal(run(loaded, fields(model)), expected)


# -- changes after patching ----------------------------------------------------------------


def change_weights(model: Any) -> None:
    state = make().state_dict()
    model.load_state_dict({k: v * 1.1 for k, v in state.items()}, strict=False)


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        attention(model).earth_specific_bias[0, 0, 0, 0, 0] += 1


def change_window(model: Any) -> None:
    attention(model).window_size = (1, 6, 4)


@pytest.mark.parametrize("change", [change_weights, change_in_place, change_window])
def test_terms_of_another_bias_are_refused(change: Callable[[Any], None]) -> None:
    model = make()
    patch(model)
    change(model)
    with pytest.raises(StaleTermsError, match="EarthAttention3D have changed"):
        run(model, fields(model))


def test_other_weights_than_the_bias_need_no_new_terms() -> None:
    model = make()
    patch(model)
    with torch.no_grad():
        attention(model).linear1.weight.mul_(1.5)
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    inputs = fields(model)
    assert_parity(run(model, inputs), run(plain, inputs), true_output(plain, inputs))


def test_unpatching_gives_the_original_back() -> None:
    model = make()
    plain, names = run(model, fields(model)), list(model.state_dict())
    patch(model)
    assert isinstance(attention(model), PanguEarthAttention)
    assert unpatch_model(model) == 6
    assert type(attention(model)) is EarthAttention3D
    assert list(model.state_dict()) == names
    assert torch.equal(run(model, fields(model)), plain)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_patched_model_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    model = make()
    patch(model)
    expected = run(model, fields(model))
    assert torch.equal(run(duplicate(model), fields(model)), expected)


def test_training_equals_the_original_with_gradients_to_the_bias() -> None:
    model = make(dropout=0.1, drop_path=0.2).train()
    reference = copy.deepcopy(model)
    patch(model)
    for each in (model, reference):
        torch.manual_seed(4)
        sum(out.square().sum() for out in each(*fields(model))).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, theirs[name].grad), name
    assert float(attention(model).earth_specific_bias.grad.abs().max()) > 0


# -- pangu-pytorch -------------------------------------------------------------------------


class StandIn(nn.Module):
    """A block that makes its mask as pangu-pytorch does: for each call, for each longitude."""

    def __init__(self, types: int) -> None:
        super().__init__()
        self.window_size = (2, 6, 12)
        self.type_of_windows = types
        self.attention = EarthAttention3D(8, 2, self.window_size, types)

    def gen_mask(self, x: Tensor) -> Tensor:
        _, z, h, w, _ = x.shape
        mask = shift_mask((z, h, w), self.window_size)
        return mask.expand(w // self.window_size[2], -1, -1, -1).clone()

    def forward(self, x: Tensor, roll: bool) -> Tensor:
        shape = (1, 8, self.type_of_windows // 4 * 6, len(x) * 12, 1)
        mask = self.gen_mask(torch.empty(shape)) if roll else None
        out: Tensor = self.attention(x, mask)
        return out


def stand_in_layer() -> Any:
    torch.manual_seed(0)
    blocks = {f"EarthSpecificBlock{i}": StandIn(8) for i in range(2)}
    layer = nn.ModuleDict({"blocks": nn.ModuleDict(blocks)}).eval()
    for block in blocks.values():
        nn.init.normal_(block.attention.earth_specific_bias)
    return layer


def test_the_mask_of_a_block_that_makes_one_for_each_call_is_planned() -> None:
    layer = stand_in_layer()
    plan = patch(layer)
    assert [site.terms() for site in plan.sites] == [("dense",), ("dense", "regions")]
    block = layer["blocks"]["EarthSpecificBlock1"]
    x = torch.randn(3, 8, 144, 8)
    plain = copy.deepcopy(block)
    unpatch_model(plain)
    with torch.no_grad():
        truth = copy.deepcopy(plain).double()(x.double(), roll=True)
        actual = block(x, roll=True)
        assert_parity(actual, plain(x, roll=True), truth)
    assert not block.attention.score_bias.mask_memo.doubtful
    assert not any(isinstance(t, Dense) and len(t.bias) == 1
                   for t in block.attention.score_bias.bias.terms)  # fmt: skip


def test_a_block_whose_windows_do_not_fill_eight_levels_plans_no_mask() -> None:
    layer = stand_in_layer()
    for block in layer["blocks"].values():
        block.type_of_windows = 7
    plan = patch(layer)
    assert [site.terms() for site in plan.sites] == [("dense",), ("dense",)]


def test_the_class_names_of_both_lead_here() -> None:
    names = Registry().class_names()
    assert "models.layers.EarthAttention3D" in names
    assert "flashbias_convert.models.pangu.attention.EarthAttention3D" in names


def test_a_class_of_this_name_with_another_bias_is_unsupported() -> None:
    attn = EarthAttention3D(8, 2, (1, 2, 2), 3).eval()
    attn.earth_specific_bias = nn.Parameter(torch.zeros(16, 3, 2))
    (site,) = inspect_model(attn, force_all=True).sites
    assert site.status == "unsupported" and "pangu-pytorch" in site.reason


@pytest.mark.parametrize(("dim", "heads", "latitudes"), [(192, 6, 181), (384, 12, 91)])
def test_blocks_of_the_reproduction(dim: int, heads: int, latitudes: int) -> None:
    """Runs where the repository of pangu-pytorch is on the path."""
    layers = pytest.importorskip("models.layers")
    if not hasattr(layers, "EarthSpecificLayer"):
        pytest.skip("another package is called models.layers")
    torch.manual_seed(0)
    layer = layers.EarthSpecificLayer(2, dim, [0.0, 0.0], heads, False, torch.device("cpu")).eval()
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, layers.EarthAttention3D):
                module.earth_specific_bias.normal_()
                module.linear1.weight.normal_(0, 0.1)
        x = torch.randn(1, 8 * latitudes * 12, dim)
        plain = layer(x, 8, latitudes, 12)
        plan = patch(layer)
        assert [site.terms() for site in plan.sites] == [("dense",), ("dense", "regions")]
        actual = layer(x, 8, latitudes, 12)
        unpatch_model(layer)
        truth = layer.double()(x.double(), 8, latitudes, 12)
    assert_parity(actual, plain, truth)
