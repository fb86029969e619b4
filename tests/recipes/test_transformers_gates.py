"""WavLM, LiLT and LayoutLMv3, patched, against the originals, with random weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.modules import ScoreBiasModule
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised
from tests.support import assert_parity

transformers = pytest.importorskip("transformers")

N, VOCABULARY = 20, 97
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
}  # fmt: skip


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (3, N), generator=torch.Generator().manual_seed(1))


def padding() -> Tensor:
    mask = torch.ones(3, N, dtype=torch.long)
    mask[0, -7:], mask[1, -3:] = 0, 0
    return mask


def boxes() -> Tensor:
    """Boxes (x0, y0, x1, y1) on a page of 100."""
    corners = torch.randint(0, 50, (3, N, 4), generator=torch.Generator().manual_seed(2))
    corners[..., 2:] += corners[..., :2]
    return corners


# -- WavLM ---------------------------------------------------------------------------------


def wavlm(stable: bool = False) -> Any:
    config = transformers.WavLMConfig(
        **SIZES, conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 8), num_buckets=16,
        max_bucket_distance=12, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        do_stable_layer_norm=stable, feat_extract_norm="layer" if stable else "group",
        layerdrop=0.0, mask_time_prob=0.0,
    )  # fmt: skip
    made = transformers.WavLMModel(config)
    return randomised(made, rel_attn_embed=2.0, gru_rel_pos_const=1.0, gru_rel_pos_linear=1.0)


def wavlm_case(padded: bool, stable: bool = False) -> Case:
    def run(model: Any) -> Tensor:
        sound = torch.randn(2, 16 * N, generator=torch.Generator().manual_seed(1))
        sound = sound.bfloat16().half().to(next(model.parameters()).dtype)
        mask = None
        if padded:
            mask = torch.ones(2, 16 * N, dtype=torch.long)
            mask[0, -100:] = 0
        states: Tensor = model(sound, attention_mask=mask).last_hidden_state
        if mask is None:
            return states
        real = model._get_feature_vector_attention_mask(states.shape[1], mask)
        assert not real.all()
        return states[real]

    return Case(lambda: wavlm(stable), run, ("rel_attn_embed.weight",), {"patched": 2})


# -- LiLT and LayoutLMv3 -------------------------------------------------------------------


def lilt() -> Any:
    config = transformers.LiltConfig(
        **SIZES | {"hidden_size": 48},
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        max_2d_position_embeddings=128,
    )
    return randomised(transformers.LiltModel(config), layout_query=0.7, layout_key=0.7)


def layoutlm(eager: bool = False, **changes: Any) -> Any:
    settings: dict[str, Any] = SIZES | {
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "max_2d_position_embeddings": 128,
        "coordinate_size": 5, "shape_size": 6, "input_size": 16, "patch_size": 8,
        "rel_pos_bins": 8, "max_rel_pos": 16, "rel_2d_pos_bins": 8, "max_rel_2d_pos": 24,
    }  # fmt: skip
    config = transformers.LayoutLMv3Config(**settings | changes)
    if eager:
        config._attn_implementation = "eager"  # else sdpa, where the model offers it
    return randomised(transformers.LayoutLMv3Model(config), rel_pos=4.0)


def documents(model: Any, mask: Tensor | None, image: bool = False, **kwargs: Any) -> Any:
    if image:
        pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(3))
        kwargs["pixel_values"] = pixels.bfloat16().half().to(next(model.parameters()).dtype)
    return model(tokens(), bbox=boxes(), attention_mask=mask, **kwargs)


def document_case(make: Any, bias: tuple[str, ...], padded: bool, image: bool = False) -> Case:
    def run(model: Any) -> Tensor:
        mask = padding() if padded else None
        states: Tensor = documents(model, mask, image).last_hidden_state
        if mask is None:
            return states
        real = torch.nn.functional.pad(mask.bool(), (0, states.shape[1] - N), value=True)
        return states[real]

    return Case(make, run, bias, {"patched": 2})


LAYOUT = ("rel_pos_bias.weight", "rel_pos_x_bias.weight", "rel_pos_y_bias.weight")
STREAM = ("layout_query.weight", "layout_query.bias")
CASES = {
    "wavlm": wavlm_case(padded=False),
    "wavlm padded": wavlm_case(padded=True),
    "wavlm large": wavlm_case(padded=True, stable=True),
    "lilt": document_case(lilt, STREAM, padded=False),
    "lilt padded": document_case(lilt, STREAM, padded=True),
    "layoutlm": document_case(layoutlm, LAYOUT, padded=False),
    "layoutlm padded": document_case(layoutlm, LAYOUT, padded=True),
    "layoutlm image": document_case(layoutlm, LAYOUT, padded=True, image=True),
    "layoutlm eager": document_case(lambda: layoutlm(eager=True), LAYOUT, padded=True),
}
PADDED = ("wavlm padded", "lilt padded", "layoutlm padded")


@pytest.fixture(params=PADDED)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[str(request.param)]


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


def test_comes_and_goes(case: Case) -> None:
    parity.check_comes_and_goes(case, pickles=case is not CASES["wavlm padded"])


def test_other_weights_bring_their_bias(case: Case) -> None:
    parity.check_follows_weights(case)


def test_training_is_the_original() -> None:
    parity.check_training(CASES["wavlm padded"], together=True)
    parity.check_training(CASES["lilt padded"], together=True)
    # the original gives its tables no gradients: see whether one of another parameter is there
    case = CASES["layoutlm image"]
    parity.check_training(Case(case.make, case.run, ("query.weight",), case.counts), together=True)


def test_a_folder_converts_and_loads(case: Case, tmp_path: Path) -> None:
    parity.check_folder(case, tmp_path)


def test_attention_weights_come_from_the_original() -> None:
    def heard(model: Any) -> Any:
        out = model(torch.randn(2, 16 * N, generator=torch.Generator().manual_seed(1)),
                    output_attentions=True)  # fmt: skip
        return out.last_hidden_state, out.attentions

    parity.check_attention_weights(CASES["wavlm"], heard)

    def read(model: Any) -> Any:
        out = documents(model, padding(), output_attentions=True)
        return out.last_hidden_state, out.attentions

    parity.check_attention_weights(CASES["lilt padded"], read)
    eager = document_case(lambda: layoutlm(eager=True), LAYOUT, padded=True)
    parity.check_attention_weights(eager, read)


def test_layoutlm_without_a_bias_is_left_alone() -> None:
    plan = inspect_model(layoutlm(has_relative_attention_bias=False))
    assert plan.counts() == {"left alone": 2} and "without" in plan.sites[0].reason


def test_layoutlm_takes_the_masks_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mask = layoutlm(), padding()
    if not model._supports_flex_attn:
        pytest.skip("LayoutLMv3 does not offer flex attention in this version of transformers")
    # transformers compiles it, and for processors with AVX2 torch 2.14 gets an index wrong there
    made = flex_attention.create_block_mask
    monkeypatch.setattr(
        "transformers.masking_utils.create_block_mask",
        lambda *args, **options: made(*args, **{**options, "_compile": False}),
    )
    with torch.no_grad():
        plain = documents(model, mask, image=True).last_hidden_state
        truth = documents(copy.deepcopy(model).double(), mask, image=True).last_hidden_state
        model.set_attn_implementation("flex_attention")
        patch_model(model, backend="sdpa", force_all=True)
        out = documents(model, mask, image=True).last_hidden_state
    real = torch.nn.functional.pad(mask.bool(), (0, out.shape[1] - N), value=True)
    assert_parity(out[real], plain[real], truth[real])


@pytest.mark.parametrize("name", ["lilt padded", "layoutlm padded", "wavlm padded"])
def test_the_fused_path_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it gets the padding."""
    calls: list[Any] = []
    forward = ScoreBiasModule.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["key_mask"])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ScoreBiasModule, "forward", counted)
    model = CASES[name].make()
    patch_model(model, backend="sdpa", force_all=True)
    CASES[name].output(model)
    assert len(calls) == 2 and all(mask is not None and not mask.all() for mask in calls)
