"""`from_pretrained` of transformers with a FlashBiasConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flashbias_convert import FlashBiasConfig, load_model, patch_model, unpatch_model
from flashbias_convert.checkpoint import convert_checkpoint, restore_checkpoint
from flashbias_convert.errors import CheckpointError, UsageError
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.swap import patched_modules

from .test_saved_elsewhere import bloom, patched_sites, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Auto = transformers.AutoModelForCausalLM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bloom().save_pretrained(tmp_path / "original")
    return tmp_path / "original"


def load(folder: Path, cls: Any = Auto, **options: Any) -> Any:
    config = FlashBiasConfig(backend="eager", **options)
    return cls.from_pretrained(folder, quantization_config=config)


def test_an_original_folder_is_converted_while_it_is_loaded(folder: Path) -> None:
    model = load(folder, force_all=True)
    expected = bloom()
    patch_model(expected, force_all=True, backend="eager")
    assert patched_sites(model) == 2
    assert torch.equal(run(model), run(expected))
    assert isinstance(model, transformers.BloomForCausalLM) and not model.training


@pytest.mark.parametrize("size", ["50GB", "4KB"])
@pytest.mark.parametrize("how", ["save_pretrained", "convert"])
def test_a_converted_folder_keeps_its_conversion(
    folder: Path, tmp_path: Path, how: str, size: str, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "convert":
        saved = convert_checkpoint(folder).output
        assert saved is not None
    else:
        saved = tmp_path / "saved"
        load(folder, force_all=True).save_pretrained(saved, max_shard_size=size)
    model = load(saved)
    assert patched_sites(model) == 2
    assert torch.equal(run(model), run(load_model(saved, backend="eager")))
    assert "UNEXPECTED" not in caplog.text and "not used" not in caplog.text


def test_the_config_says_so_and_others_can_read_it(folder: Path, tmp_path: Path) -> None:
    load(folder, force_all=True).save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["flashbias"]["sites"] == 2
    assert "quantization_config" not in config
    plain = Auto.from_pretrained(tmp_path / "m")  # without this package: the original
    assert patched_sites(plain) == 0
    assert torch.equal(run(plain), run(bloom()))


@pytest.mark.parametrize("size", ["50GB", "4KB"])  # one file, and shards, which are streamed
def test_a_converted_folder_says_so_too_and_a_restored_one_no_longer(
    tmp_path: Path, size: str
) -> None:
    folder = tmp_path / "original"
    bloom().save_pretrained(folder, max_shard_size=size)
    before = (folder / "config.json").read_bytes()
    converted = convert_checkpoint(folder, tmp_path / "m").output
    assert converted is not None
    config = json.loads((converted / "config.json").read_text())
    entry = config.pop("flashbias")
    assert entry["sites"] == 2 and config == json.loads(before)
    restored = restore_checkpoint(converted, tmp_path / "r").output
    assert json.loads((restored / "config.json").read_bytes()) == json.loads(before)
    assert (folder / "config.json").read_bytes() == before


def test_the_base_of_a_model_with_a_head_and_the_other_way_round(
    folder: Path, tmp_path: Path
) -> None:
    whole = load(folder, force_all=True)
    whole.save_pretrained(tmp_path / "whole")
    base = load(tmp_path / "whole", transformers.AutoModel)
    assert patched_sites(base) == 2
    assert torch.equal(run(base), run(whole.transformer))
    base.save_pretrained(tmp_path / "base")
    again = load(tmp_path / "base", Auto)
    assert patched_sites(again) == 2
    assert torch.equal(run(again.transformer), run(base))


def test_terms_keep_their_dtypes(folder: Path, tmp_path: Path) -> None:
    load(folder, force_all=True).save_pretrained(tmp_path / "m")
    config = FlashBiasConfig(backend="eager")
    model = Auto.from_pretrained(tmp_path / "m", quantization_config=config, dtype=torch.float16)
    assert model.dtype == torch.float16
    slopes = [b for n, b in model.named_buffers() if n.endswith("slopes")]
    assert slopes and all(b.dtype == torch.float32 for b in slopes)


def test_it_can_be_trained_cast_and_unpatched_like_any_other(folder: Path) -> None:
    model = load(folder, force_all=True)
    assert not model.is_quantized and not hasattr(model, "hf_quantizer")
    model.half().float().train()
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert unpatch_model(model) == 2
    assert not any(isinstance(m, PatchedAttention) for m in model.modules())


def test_options_that_come_too_late_are_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder, force_all=True).save_pretrained(tmp_path / "m")
    load(tmp_path / "m", energy=0.9)
    assert "was converted already; not used: energy" in caplog.text


def test_errors_reach_the_caller(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="energy"):
        load(folder, energy=7.0)
    model = load(folder, force_all=True)
    model.transformer.h[0].self_attention.score_bias.alibi.slopes.fill_(float("nan"))
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path / "m")


def test_an_encoder_alone_takes_its_own_terms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    whole = transformers.T5ForConditionalGeneration(config).eval()
    for name, parameter in whole.named_parameters():
        if name.endswith("relative_attention_bias.weight"):
            torch.nn.init.normal_(parameter)
    whole.save_pretrained(tmp_path / "t5")
    convert_checkpoint(tmp_path / "t5", tmp_path / "out", options=DecomposeOptions(force_all=True))
    encoder = transformers.T5EncoderModel.from_pretrained(
        tmp_path / "out", quantization_config=FlashBiasConfig()
    )
    assert len(patched_modules(encoder)) == 2 and "no decoder" in caplog.text
    ids = torch.arange(10)[None]
    with torch.no_grad():
        found, expected = (m(ids).last_hidden_state for m in (encoder, whole.get_encoder()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
