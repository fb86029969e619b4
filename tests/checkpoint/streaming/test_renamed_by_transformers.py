"""Models whose weights transformers renames as it loads them are converted shard by shard, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flashbias_convert import load_model
from flashbias_convert.checkpoint import convert_checkpoint, read_checkpoint, restore_checkpoint
from flashbias_convert.checkpoint.transformers_names import renamed
from flashbias_convert.options import DecomposeOptions

from ..sharded import contents
from .shards import hidden

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZE = {"image_size": 32, "patch_size": 4}
SWIN = {**SIZE, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
BEIT = {
    **SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "use_relative_position_bias": True,
}  # fmt: skip
ALL = {"options": DecomposeOptions(method="exact")}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Swin": ("SwinForImageClassification", "SwinConfig", SWIN),
    "Swin without a head": ("SwinModel", "SwinConfig", SWIN),
    "SwinV2": ("Swinv2ForImageClassification", "Swinv2Config", SWIN),
    "BEiT": ("BeitForImageClassification", "BeitConfig", BEIT),
}


def write(folder: Path, name: str, shards: str = "100KB") -> tuple[Path, Any]:
    """A model with random weights and biases that matter, as transformers saves it."""
    cls, config, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**sizes)).eval()
    for key, parameter in model.named_parameters():
        if "bias_table" in key:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=shards)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder, model


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_transformers_are_converted_one_by_one(tmp_path: Path, name: str) -> None:
    source, original = write(tmp_path / "m", name)
    before = contents(source)
    done = convert_checkpoint(source, tmp_path / "out", **ALL)
    assert done.held is None and done.notes == () and len(done.plan.patched) == len(done.plan.sites)
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) == 1 + len(list(source.glob("*.safetensors")))
    whole = convert_checkpoint(source, tmp_path / "whole", **ALL, max_shard_size="1GB")
    assert whole.held is not None
    found, expected = (read_checkpoint(tmp_path / n).tensors for n in ("out", "whole"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        served, truth = load_model(tmp_path / "out")(x)[0], original(x)[0]
    torch.testing.assert_close(served, truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))
    assert contents(source) == before and hidden(tmp_path) == []


@pytest.mark.parametrize("name", ["Swin", "BEiT"])
def test_what_was_renamed_is_restored_as_it_was(tmp_path: Path, name: str) -> None:
    source, _ = write(tmp_path / "m", name)
    output = convert_checkpoint(source, tmp_path / "out", **ALL).output
    back = restore_checkpoint(output, tmp_path / "back").output
    expected, held = read_checkpoint(source), load_file(back / "model.safetensors")
    assert held.keys() == set(expected.names.values())
    for key, in_file in expected.names.items():
        assert torch.equal(held[in_file], expected.tensors[key])


def test_what_is_more_than_a_new_name_is_left_to_transformers() -> None:
    """Experts of Mixtral become one tensor, which no shard holds."""
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    saved = [
        f"model.layers.0.block_sparse_moe.experts.{e}.w{w}.weight"
        for e in (0, 1)
        for w in (1, 2, 3)
    ]
    if renamed([], model) is None:
        pytest.skip("this transformers has no rules for names")
    assert renamed(saved, model) is None
    assert renamed(["model.norm.weight"], model) == {"model.norm.weight": "model.norm.weight"}
