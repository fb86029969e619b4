"""Window models of three libraries, converted from files and loaded again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flashbias_convert import RelativeTable, patch_model, save_model
from flashbias_convert.checkpoint import convert_checkpoint, load_model
from flashbias_convert.checkpoint.architecture import as_architecture
from flashbias_convert.checkpoint.build import build_model
from flashbias_convert.errors import CheckpointError, UnknownArchitectureError, UsageError
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.swap import patched_modules
from tests.recipes.parity import randomise
from tests.support import assert_parity, nudged

EXACT = DecomposeOptions(method="exact")
TIMM_SWIN = {
    "img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [1, 2],
    "window_size": 4, "num_classes": 5,
}  # fmt: skip
TIMM_BEIT = {
    "img_size": 20, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5,
    "use_shared_rel_pos_bias": True,
}  # fmt: skip
SWIN = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [1, 2],
    "window_size": 4,
}  # fmt: skip
BEIT = {
    "image_size": 20, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 16, "use_relative_position_bias": True,
    "use_shared_relative_position_bias": True,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "timm Swin": ("timm:swin_tiny_patch4_window7_224", TIMM_SWIN, 32),
    "timm BEiT": ("timm:beit_base_patch16_224", TIMM_BEIT, 20),
    "Swin": ("transformers:SwinForImageClassification", {"model_type": "swin", **SWIN}, 32),
    "Swinv2": ("transformers:Swinv2ForImageClassification", {"model_type": "swinv2", **SWIN}, 32),
    "Donut": ("transformers:DonutSwinModel", {"model_type": "donut-swin", **SWIN}, 32),
    "BEiT": ("transformers:BeitForImageClassification", {"model_type": "beit", **BEIT}, 20),
}


def output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Any = model(x)
    found = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    return out.last_hidden_state if found is None else found


def check(name: str, args: dict[str, Any], size: int, path: Path, frames: int = 0) -> None:
    model = build_model(as_architecture(name, args))
    randomise(model)
    shape = (1, 3, frames, size, size) if frames else (1, 3, size, size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain = output(model, x)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, path)
    done = convert_checkpoint(path, arch=name, arch_args=args, options=EXACT)
    loaded = load_model(done.output)
    assert len(patched_modules(loaded)) >= 2
    ours = output(loaded, x)

    def nearby(number: int) -> tuple[Tensor, Tensor]:
        twin = nudged(model, number)
        return output(twin, x), output(twin.double(), x.double())

    assert_parity(ours, plain, output(copy.deepcopy(model).double(), x.double()), nearby=nearby)


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_file_loads_as_the_same_model(name: str, tmp_path: Path) -> None:
    check(*MODELS[name], tmp_path / "model.safetensors")


@pytest.mark.parametrize("kind", ["Swin", "Swin V2", "Video Swin"])
def test_a_model_of_torchvision(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("torchvision.models")
    frames = 4 if kind == "Video Swin" else 0
    ahead = [2] if frames else []

    def tiny_swin(*, weights: Any = None, **kwargs: Any) -> nn.Module:
        assert weights is None
        images = models.swin_transformer
        if kind == "Swin V2":
            kwargs |= {"block": images.SwinTransformerBlockV2}
            kwargs |= {"downsample_layer": images.PatchMergingV2}
        cls = models.video.SwinTransformer3d if frames else models.SwinTransformer
        return cls(  # type: ignore[no-any-return]
            patch_size=[*ahead, 2, 2], embed_dim=16, depths=[2, 1], num_heads=[1, 2],
            window_size=[*ahead, 4, 4], **kwargs,
        )  # fmt: skip

    monkeypatch.setitem(models._api.BUILTIN_MODELS, "tiny_swin", tiny_swin)
    check("torchvision:tiny_swin", {"num_classes": 5}, 32, tmp_path / "model.safetensors", frames)


def test_architectures_of_torchvision_are_known_by_name_only() -> None:
    pytest.importorskip("torchvision")
    assert type(build_model(as_architecture("torchvision:swin_t"), "meta")).__name__ == (
        "SwinTransformer"
    )
    with pytest.raises(UnknownArchitectureError, match="no model 'swin_x'"):
        build_model(as_architecture("torchvision:swin_x"))
    with pytest.raises(UsageError, match="may not set weights"):
        build_model(as_architecture("torchvision:swin_t", {"weights": "DEFAULT"}))


def test_torchvision_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchvision", None)
    with pytest.raises(UnknownArchitectureError, match="needs torchvision"):
        build_model(as_architecture("torchvision:swin_t"))


def test_long_tables_of_distances_are_saved_and_loaded(tmp_path: Path) -> None:
    """Their margin is more than what placeholders have before a file has filled them."""
    kwargs = {**TIMM_SWIN, "img_size": (2, 512), "depths": [1], "num_heads": [2],
              "window_size": (1, 256)}  # fmt: skip
    model = timm.create_model("swin_tiny_patch4_window7_224", **kwargs).eval()
    randomise(model)
    images = torch.randn(1, 3, 2, 512)
    with torch.no_grad():
        expected = model(images)
        plan = patch_model(model, method="exact")
        (site,) = plan.patched
        assert site.spec["terms"][0]["static"]["by_distance"] == -1
        torch.testing.assert_close(model(images), expected)
        save_model(model, tmp_path / "model.safetensors")
        loaded = load_model(tmp_path / "model.safetensors")
        assert torch.equal(loaded(images), model(images))
    (module,) = patched_modules(loaded)
    (term,) = module.score_bias.bias.terms
    assert isinstance(term, RelativeTable) and term.by_distance == -1 and term.entries == 511


def test_codes_that_do_not_count_distances_are_refused(tmp_path: Path) -> None:
    kwargs = {**TIMM_SWIN, "img_size": (2, 512), "depths": [1], "num_heads": [2],
              "window_size": (1, 256)}  # fmt: skip
    model = timm.create_model("swin_tiny_patch4_window7_224", **kwargs).eval()
    patch_model(model, method="exact")
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    (name,) = (key for key in tensors if key.endswith(".u"))
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CheckpointError, match="do not count distances that way"):
        load_model(path)
