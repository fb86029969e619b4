"""SAM, its copies and MViTv2, patched, against the originals, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import fallback, inspect_model, patch_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

BIAS = ("rel_pos_h", "rel_pos_w")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 4,
}  # fmt: skip
#: windows of 3 on a map of 8: the last ones are padded; the second layer looks at the whole map
SAM: dict[str, Any] = SIZES | {
    "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 32, "output_channels": 8,
}  # fmt: skip


def pixels(model: nn.Module, height: int = 32, width: int = 32) -> Tensor:
    made = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    dtype = next(model.parameters()).dtype
    return made.bfloat16().half().to(dtype)  # the same numbers in every dtype


def sam(eager: bool = False, **changes: Any) -> Any:
    config = transformers.SamVisionConfig(**SAM | changes)
    config._attn_implementation = "eager" if eager else "sdpa"
    return randomised(transformers.SamVisionModel(config), rel_pos=0.7)


def sam_hq() -> Any:
    return randomised(
        transformers.SamHQVisionModel(transformers.SamHQVisionConfig(**SAM)), rel_pos=0.7
    )


def vitdet() -> Any:
    config = transformers.VitDetConfig(
        **SIZES, window_size=3, window_block_indices=[0], pretrain_image_size=32,
        use_relative_position_embeddings=True, use_absolute_position_embeddings=True,
    )  # fmt: skip
    return randomised(transformers.VitDetModel(config), rel_pos=0.7)


def timm_sam(**changes: Any) -> Any:
    from timm.models.vision_transformer_sam import VisionTransformerSAM

    settings = {
        "img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4,
        "mlp_ratio": 1.0, "use_rel_pos": True, "window_size": 3, "global_attn_indexes": (1,),
        "neck_chans": 8, "num_classes": 7,
    }  # fmt: skip
    return randomised(VisionTransformerSAM(**settings | changes), rel_pos=1.0)


def mvitv2(large: float = 1.5, **changes: Any) -> Any:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    settings = {
        "depths": (1, 2), "embed_dim": (16, 32), "num_heads": (2, 4), "mlp_ratio": 1,
        "stride_q": ((1, 1), (2, 2)), "stride_kv": ((4, 4), (2, 2)), "stride_kv_adaptive": None,
    }  # fmt: skip
    cfg = MultiScaleVitCfg(**settings | changes)
    return randomised(MultiScaleVit(cfg, img_size=32, num_classes=7), rel_pos=large)


def first(model: Any) -> Tensor:
    """The first thing that a vision model returns for an image."""
    out = model(pixels(model))
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found


MAKE: dict[str, Callable[[], Any]] = {
    "sam": sam,
    "sam eager": lambda: sam(eager=True),
    "sam_hq": sam_hq,
    "vitdet": vitdet,
    "timm sam": timm_sam,
    "timm sam norms": lambda: timm_sam(qk_norm=True),
    "mvitv2": mvitv2,
    "mvitv2 cls": lambda: mvitv2(use_cls_token=True),
    "mvitv2 plain": lambda: mvitv2(large=8.0, residual_pooling=False, mode="avg"),
}
CASES = {
    name: Case(make, first, BIAS, {"patched": 3 if "mvit" in name else 2})
    for name, make in MAKE.items()
}


class Alone(nn.Module):
    """One attention module of a copy of SAM on a map of 6 x 10, not the size of its tables."""

    def __init__(self, family: str, cls: str) -> None:
        super().__init__()
        module = parity.file_of(family)
        config = SimpleNamespace(
            hidden_size=32, num_attention_heads=4, image_size=32, patch_size=4, qkv_bias=True,
            use_rel_pos=True, use_relative_position_embeddings=True, attention_dropout=0.0,
        )  # fmt: skip
        arguments = (config,) if family == "seggpt" else (config, 0)
        self.attention = getattr(module, cls)(*arguments)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x)[0]
        return out


def on_a_map(model: nn.Module) -> Tensor:
    made = torch.randn(2, 6, 10, 32, generator=torch.Generator().manual_seed(1))
    out: Tensor = model(made.bfloat16().half().to(next(model.parameters()).dtype))
    return out


COPIES = {
    "deepseek_ocr2": ("DeepseekOcr2SamVisionAttention", "DeepseekOcr2SamVisionSdpaAttention"),
    "got_ocr2": ("GotOcr2VisionAttention",),
    "pp_formulanet": ("PPFormulaNetVisionAttention",),
    "sam": ("SamVisionAttention", "SamVisionSdpaAttention"),
    "sam_hq": ("SamHQVisionAttention", "SamHQVisionSdpaAttention"),
    "seggpt": ("SegGptAttention",),
    "slanext": ("SLANeXtVisionAttention",),
    "unlimited_ocr": ("UnlimitedOcrSamVisionAttention", "UnlimitedOcrSamVisionSdpaAttention"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[str(request.param)]


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


COPY = pytest.mark.parametrize("cls", [(k, c) for k, found in COPIES.items() for c in found])


def alone(cls: tuple[str, str]) -> Case:
    return Case(lambda: randomised(Alone(*cls), rel_pos=0.7), on_a_map, BIAS, {"patched": 1})


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@COPY
def test_copies_of_sam(cls: tuple[str, str], dtype: torch.dtype, backend: str) -> None:
    """Maps of another size than the tables: they are interpolated."""
    parity.check_values(alone(cls), dtype, backend)


@COPY
def test_copies_of_sam_train_as_before(cls: tuple[str, str]) -> None:
    parity.check_training(alone(cls))


@COPY
def test_files_of_copies_of_sam(cls: tuple[str, str], tmp_path: Path) -> None:
    parity.check_file(alone(cls), tmp_path)


def test_comes_and_goes(case: Case) -> None:
    parity.check_comes_and_goes(case)


def test_training_is_the_original(case: Case) -> None:
    parity.check_training(case)


def test_other_weights_bring_their_bias(case: Case) -> None:
    parity.check_follows_weights(case)


@pytest.mark.parametrize("name", ["sam", "sam_hq", "vitdet"])
def test_a_folder_converts_and_loads(name: str, tmp_path: Path) -> None:
    parity.check_folder(CASES[name], tmp_path)


@pytest.mark.parametrize("name", ["timm sam", "mvitv2"])
def test_a_file_loads(name: str, tmp_path: Path) -> None:
    parity.check_file(CASES[name], tmp_path)


def test_attention_weights_come_from_the_original() -> None:
    def recorded(model: Any) -> Any:
        out = model(pixels(model), output_attentions=True)
        return out.last_hidden_state, out.attentions

    parity.check_attention_weights(CASES["sam eager"], recorded)

    def returned(model: Any) -> Any:
        return model(pixels(model), output_attentions=True, return_dict=True).attentions

    parity.check_attention_weights(CASES["vitdet"], returned)


def test_compiled_calls_that_ask_for_weights_get_them(recwarn: pytest.WarningsRecorder) -> None:
    """Hooks of transformers collect them, which attention modules are not told of."""
    model = sam(eager=True)
    fallback._warn.cache_clear()
    torch.compiler.reset()
    with torch.no_grad():
        expected = model(pixels(model), output_attentions=True)
        CASES["sam eager"].patched(model)
        compiled = torch.compile(model, backend="eager")
        first, found, last = (
            compiled(pixels(model), output_attentions=asks) for asks in (False, True, False)
        )
    assert len(found.attentions) == len(expected.attentions) == 2
    torch.testing.assert_close(found.attentions, expected.attentions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(first[0], last[0]) and not first.get("attentions")
    told = [str(w.message) for w in recwarn if w.category is BackendFallbackWarning]
    assert sum("asks for attention weights" in message for message in told) == 1


def test_without_relative_positions_it_is_left_alone() -> None:
    for model in (sam(use_rel_pos=False), timm_sam(use_rel_pos=False), mvitv2(rel_pos_type="none")):
        plan = inspect_model(model)
        assert {site.status for site in plan.sites} == {"left alone"}
        assert "no relative positions" in plan.sites[0].reason


def test_sizes_are_those_of_windows_and_maps() -> None:
    assert [(s.n, s.m, s.heads, s.head_dim) for s in inspect_model(sam()).sites] == [
        (9, 9, 4, 8),
        (64, 64, 4, 8),
    ]
    seen = []
    model = mvitv2(use_cls_token=True)
    plan = patch_model(model, backend="sdpa")
    for module in model.modules():
        if hasattr(module, "score_bias"):
            module.score_bias.register_forward_hook(
                lambda _, args, __: seen.append((args[0].shape[-2], args[1].shape[-2]))
            )
    with torch.no_grad():
        first(model)
    assert seen == [(site.n, site.m) for site in plan.sites]


def test_no_matrix_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the kernel: the backends that run on a CPU do make scores."""
    from flashbias_convert.modules import ScoreBiasModule

    class Forward:
        def __call__(self, own: Any, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
            for name, inputs in kwargs["built"].items():
                own.builders[name].make(**inputs)
            return q.clone()

    monkeypatch.setattr(ScoreBiasModule, "forward", lambda *a, **k: Forward()(*a, **k))
    model = Alone("sam", "SamVisionSdpaAttention").eval()
    patch_model(model, backend="sdpa")
    side = 48
    with parity.NoSquares(side * side), torch.no_grad():
        model(torch.randn(1, side, side, 32))
