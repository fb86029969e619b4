"""Patched models in older ways to trace: torch.fx, torch.jit.trace, and torch.jit.script.

torchvision's `create_feature_extractor` and timm's `FeatureGraphNet` cut backbones out of models by
torch.fx, for detection and segmentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from flashbias_convert import patch_model
from flashbias_convert.errors import StaleTermsError, UsageError
from tests.checkpoint.models import tiny_model
from tests.recipes.parity import original, randomise
from tests.support import assert_parity, nudged

torchvision = pytest.importorskip("torchvision")
from torchvision.models import swin_transformer as images  # noqa: E402
from torchvision.models.feature_extraction import create_feature_extractor  # noqa: E402
from torchvision.models.video import swin_transformer as videos  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TINY: dict[str, Any] = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "num_classes": 5}


def swin() -> nn.Module:
    return images.SwinTransformer(patch_size=[2, 2], window_size=[4, 4], **TINY)


def swin_v2() -> nn.Module:
    return images.SwinTransformer(
        patch_size=[2, 2],
        window_size=[4, 4],
        block=images.SwinTransformerBlockV2,
        downsample_layer=images.PatchMergingV2,
        **TINY,
    )


def video() -> nn.Module:
    return videos.SwinTransformer3d(patch_size=[2, 2, 2], window_size=[4, 4, 4], **TINY)


def beit(**options: bool) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.create_model("beit_base_patch16_224", num_classes=5, **sizes, **options)


def shared_beit() -> nn.Module:
    return beit(use_rel_pos_bias=False, use_shared_rel_pos_bias=True)


def relative_vit() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.create_model("vit_srelpos_small_patch16_224", num_classes=5, **sizes)


IMAGE, CLIP = (2, 3, 32, 32), (1, 3, 4, 32, 32)  # of a clip's windows 2 of 4 frames are there
#: a model, its input, and the last node of its graph
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "torchvision swin": (swin, IMAGE, "head"),
    "torchvision swin v2": (swin_v2, IMAGE, "head"),
    "torchvision video swin": (video, CLIP, "head"),
    "timm swin v2": (tiny_model, IMAGE, "head.flatten"),
    "timm beit": (beit, IMAGE, "head"),
}
#: the whole of it is one patched module, which torch.fx cannot look into
SHARED = {"timm vit with a shared bias": (relative_vit, IMAGE, "head")}


def made(name: str) -> tuple[nn.Module, Tensor]:
    make, size, _ = (MODELS | SHARED)[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
        randomise(model)
    return model, torch.randn(size, generator=torch.Generator().manual_seed(1))


def check(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """What was made of a patched model computes what the original does."""
    plain = original(model)

    def nearby(number: int) -> tuple[Tensor, Tensor]:
        twin = nudged(plain, number)
        return twin(x), twin.double()(x.double())

    with torch.no_grad():
        truth = original(model).double()(x.double())
        assert_parity(run(x), plain(x), truth, nearby=nearby)


@pytest.mark.parametrize("name", MODELS)
def test_feature_extractors_look_into_patched_models(name: str) -> None:
    model, x = made(name)
    patch_model(model, method="exact", force_all=True, backend="sdpa")
    node = MODELS[name][2]
    extractor = create_feature_extractor(model, [node])

    def run(x: Tensor) -> Tensor:
        out: Tensor = extractor(x)[node]
        return out

    check(run, model, x)
    check(run, model, torch.cat([x.flip(-1), x]))  # nothing of the call is baked in


def test_a_feature_extractor_takes_other_sizes_and_notices_other_weights() -> None:
    model, x = made("torchvision swin")
    patch_model(model, method="exact", force_all=True, backend="sdpa")
    extractor = create_feature_extractor(model, {"features.1": "fine", "features.3": "coarse"})
    wide = torch.cat([x, x], -1)[..., :52]
    plain, truth = original(model).features, original(model).double().features
    with torch.no_grad():
        out = extractor(wide)
        assert_parity(out["fine"], plain[:2](wide), truth[:2](wide.double()))
        assert_parity(out["coarse"], plain(wide), truth(wide.double()))
        model.get_parameter("features.1.0.attn.relative_position_bias_table").add_(1.0)
        with pytest.raises(StaleTermsError):
            extractor(x)


def test_a_model_that_is_one_patched_module_says_why_it_cannot_be_traced() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = shared_beit().eval()
        randomise(model)
    patch_model(model, method="exact", force_all=True, backend="sdpa")
    with pytest.raises(UsageError, match=r"torch\.fx cannot look into a converted Beit"):
        create_feature_extractor(model, ["head"])


@pytest.mark.parametrize("name", [*MODELS, *SHARED])
def test_torch_jit_traces_patched_models(name: str) -> None:
    model, x = made(name)
    patch_model(model, method="exact", force_all=True, backend="sdpa")
    with torch.no_grad():  # the first call is the traced one, and the trace is checked
        traced = torch.jit.trace(model, x)
    check(traced, model, x)
    check(traced, model, torch.cat([2 * x.flip(-1) + 1, x]))  # of another batch
    check(model, model, x)  # tracing left nothing behind


def test_scripting_is_refused_in_words() -> None:
    model, _ = made("torchvision swin")
    patch_model(model, method="exact", force_all=True)
    with pytest.raises(UsageError, match=r"torch\.jit\.script cannot compile converted modules"):
        torch.jit.script(model)
