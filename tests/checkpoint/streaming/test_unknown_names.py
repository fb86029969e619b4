"""Files whose names transformers does not know are refused where it would leave weights random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert.checkpoint import convert_checkpoint, open_model, read_checkpoint
from flashbias_convert.errors import CheckpointError

from ..sharded import write_bloom, write_shards
from .other_names import transformers_beit, transformers_swin, with_prefix, without_prefix
from .test_names_in_files import outputs

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def swin(folder: Path) -> tuple[dict[str, Any], Any]:
    return transformers_swin(folder)[1:]


def bloom(folder: Path) -> tuple[dict[str, Any], Any]:
    write_bloom(folder, "safetensors", 3, hidden_size=16)
    return {}, torch.arange(12)[None]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
@pytest.mark.parametrize("write", [swin, bloom])
def test_a_prefix_of_a_wrapper_is_refused(
    tmp_path: Path, write: Callable[[Path], tuple[dict[str, Any], Any]], prefix: str, link: bool
) -> None:
    from flashbias_convert.huggingface import FlashBiasConfig

    source = tmp_path / "m"
    options, x = write(source)
    read = read_checkpoint(source)
    tensors = {prefix + read.names[key]: t.clone() for key, t in read.tensors.items()}
    for path in source.glob("model*"):
        path.unlink()
    write_shards(source, tensors, "safetensors")
    done = convert_checkpoint(source, tmp_path / "out", **options, link=link)
    assert done.held is None
    with pytest.raises(CheckpointError, match="does not know the names") as refused:
        transformers.AutoModel.from_pretrained(
            tmp_path / "out", quantization_config=FlashBiasConfig()
        )
    assert "load_model" in str(refused.value) and "\n" not in str(refused.value)
    assert torch.isfinite(outputs(tmp_path / "out", x)).all()
    # the source, loaded whole: to be verified, measured, or converted in memory
    opened = open_model(source)
    found = [name for name in read.tensors if name in opened.stored]
    assert len(found) > 10
    assert all(torch.equal(opened.stored[name], read.tensors[name]) for name in found)


def test_another_name_of_a_tied_weight_is_not_asked_for(tmp_path: Path) -> None:
    """A pickle can hold one tensor under two names, of which the model knows one."""
    from flashbias_convert.huggingface import FlashBiasConfig

    source = tmp_path / "m"
    write_bloom(source, "safetensors", 2, hidden_size=16)
    read = read_checkpoint(source)
    tensors = {read.names[key]: tensor.clone() for key, tensor in read.tensors.items()}
    for path in source.glob("model*"):
        path.unlink()
    word = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors.pop("lm_head.weight", None)
    tensors["alias.of"] = tensors[word]
    write_shards(source, tensors, "bin")
    convert_checkpoint(source, tmp_path / "out")
    cls = transformers.BloomForCausalLM
    how: dict[str, Any] = {"dtype": torch.float32}
    loaded = cls.from_pretrained(tmp_path / "out", quantization_config=FlashBiasConfig(), **how)
    plain, ids = cls.from_pretrained(tmp_path / "out", **how), torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "maker", [transformers_swin, transformers_beit, without_prefix, with_prefix]
)
def test_names_that_it_knows_are_loaded_with_and_without_a_head(
    tmp_path: Path, maker: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    from flashbias_convert.huggingface import FlashBiasConfig
    from flashbias_convert.swap import patched_modules

    source, options, _ = maker(tmp_path / "m")
    convert_checkpoint(source, tmp_path / "out", **options)
    name = json.loads((source / "config.json").read_text())["architectures"][0]
    for cls in (getattr(transformers, name), transformers.AutoModel):
        model = cls.from_pretrained(tmp_path / "out", quantization_config=FlashBiasConfig())
        assert patched_modules(model)
    assert "MISSING" not in caplog.text
