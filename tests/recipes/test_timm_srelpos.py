"""vit_srelpos of timm, where all blocks share one bias, patched, against the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, load_model, patch_model, save_model
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised
from tests.support import assert_parity
from tests.timm_abilities import RESIZES, needs

relpos = pytest.importorskip("timm.models.vision_transformer_relpos")


def vit(large: float = 1.0, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "img_size": (20, 24), "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2,
        "rel_pos_dim": 24, "num_classes": 5, "init_values": 1.0, "shared_rel_pos": True,
    }  # fmt: skip
    return randomised(relpos.VisionTransformerRelPos(**arguments | changes), shared_rel_pos=large)


def image(model: nn.Module, height: int = 20, width: int = 24) -> Tensor:
    made = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    return made.bfloat16().half().to(next(model.parameters()).dtype)


def run(model: Any) -> Tensor:
    out: Tensor = model.forward_head(model.forward_features(image(model)))
    return out


def whole(model: Any) -> Tensor:
    out: Tensor = model(image(model))
    return out


MLP = ("shared_rel_pos.mlp.fc2.weight", "shared_rel_pos.mlp.fc2.bias")
TABLE = ("shared_rel_pos.relative_position_bias_table",)
#: the bias of Swin V2 is 16 sigmoid(0) everywhere without weights, which softmax ignores
CASES = {
    "mlp": Case(vit, whole, MLP, {"patched": 2}),
    "mlp cls": Case(lambda: vit(class_token=True), whole, MLP, {"patched": 2}),
    "swin": Case(lambda: vit(0.4, rel_pos_type="mlp_swin"), whole, MLP[:1], {"patched": 2}),
    "table": Case(lambda: vit(rel_pos_type="bias"), whole, TABLE, {"patched": 2}),
    "table cls": Case(
        lambda: vit(rel_pos_type="bias", class_token=True), whole, TABLE, {"patched": 2}
    ),
}


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


@pytest.mark.parametrize("name", ["mlp", "table cls"])
def test_changes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    parity.check_comes_and_goes(case)
    parity.check_training(case, together=True)
    parity.check_follows_weights(case)
    model = case.make()
    case.patched(model)
    save_model(model, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path / "model.safetensors", arch=case.make, backend="sdpa")
    assert torch.equal(case.output(loaded), case.output(model))


@pytest.mark.parametrize("name", CASES)
def test_no_matrix_is_handed_on(name: str) -> None:
    """But by a call of features alone, whose blocks add it as it comes."""
    case, handed = CASES[name], []
    model = case.make()
    truth = run(parity.copy.deepcopy(model).double()).detach()
    plain = run(model).detach()
    case.patched(model)
    for block in model.blocks:
        block.attn.register_forward_pre_hook(
            lambda _, __, call: handed.append(call["shared_rel_pos"]), with_kwargs=True
        )
    case.output(model)
    assert len(handed) == 2 and all(isinstance(one, dict) for one in handed)
    with torch.no_grad():
        assert_parity(run(model), plain, truth)
    assert all(isinstance(one, Tensor) for one in handed[2:])


def test_another_image_size_brings_its_table() -> None:
    model = CASES["table cls"].make()
    needs(hasattr(model, "set_input_size"), RESIZES)
    patch_model(model, backend="sdpa", force_all=True)
    model.set_input_size((28, 16))
    other = vit(rel_pos_type="bias", class_token=True)
    other.set_input_size((28, 16))
    x = image(other, 28, 16)
    with torch.no_grad():
        plain, truth = other(x), parity.copy.deepcopy(other).double()(x.double())
        assert_parity(model(x), plain, truth)


def test_garbage_in_the_buffers_is_refused() -> None:
    model = vit()
    model.shared_rel_pos.relative_position_index.zero_()
    assert inspect_model(model).counts() == {"unsupported": 2}


@pytest.mark.parametrize("name", ["mlp", "table cls"])
def test_a_bias_that_accelerate_offloads(name: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = CASES[name].make()
    patch_model(model, method="exact", force_all=True, backend="eager")
    with torch.no_grad():
        expected = whole(model)
        x = image(model)
        accelerate.cpu_offload(model, execution_device="cpu")
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
