"""From a checkpoint to its architecture, and never a silent guess."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flashbias_convert.checkpoint import (
    Architecture,
    architecture,
    build_model,
    identify,
    open_model,
    read_checkpoint,
)
from flashbias_convert.errors import CheckpointError, UnknownArchitectureError, UsageError

from .models import ARGS, NAME, tiny_model, tiny_weights, write_tiny, write_tiny_folder

PAIR = ["swinv2_tiny_window8_256", "swinv2_tiny_window16_256"]


@pytest.fixture
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with two architectures instead of all: building them takes time."""
    monkeypatch.setattr(timm, "list_models", lambda *args, **kwargs: list(PAIR))


@pytest.fixture(scope="module")
def full_size() -> nn.Module:
    return timm.create_model(PAIR[1], num_classes=7)


def first_authors_layout(model: nn.Module) -> dict[str, Tensor]:
    """The keys of the checkpoints that came with the paper on SwinV2."""

    def rename(key: str) -> str:
        key = re.sub(
            r"layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", key
        )
        return key.replace("head.fc.", "head.")

    buffers = {k: b for k, b in model.named_buffers() if not k.endswith("k_bias")}
    return {**{rename(k): v for k, v in model.state_dict().items()}, **buffers}


def test_a_folder_of_timm_says_everything(tmp_path: Path) -> None:
    opened = open_model(write_tiny_folder(tmp_path / "m"))
    assert (opened.architecture.library, opened.architecture.name) == ("timm", NAME)
    cfg = opened.architecture.args["pretrained_cfg"]
    assert cfg["num_classes"] == 5 and "file" not in cfg
    assert opened.model.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    json.dumps(opened.architecture.to_json())


def test_a_config_beside_a_file_counts(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    found = identify(read_checkpoint(folder / "model.safetensors"))
    assert found.name == NAME and found.origin.endswith("config.json")


def test_the_older_config_layout_of_timm(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": NAME, "num_classes": 5}))
    found = identify(read_checkpoint(tmp_path))
    assert found.args["pretrained_cfg"]["num_classes"] == 5


def test_arguments_of_a_training_run(tmp_path: Path) -> None:
    kwargs = {k: v for k, v in ARGS.items() if k not in ("num_classes", "img_size")}
    args = argparse.Namespace(model=NAME, num_classes=5, img_size=32, model_kwargs=kwargs)
    torch.save({"state_dict": tiny_weights(), "arch": "swin", "args": args}, tmp_path / "x.pth.tar")
    assert open_model(tmp_path / "x.pth.tar").architecture.name == NAME


def test_the_caller_knows_best(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    by_name = open_model(path, arch=f"timm:{NAME}", arch_args=ARGS)
    by_function = open_model(path, arch=tiny_model)
    by_object = open_model(path, arch=Architecture("timm", NAME, ARGS))
    for opened in (by_name, by_function, by_object):
        assert torch.equal(opened.model.head.fc.weight, tiny_weights()["head.fc.weight"])


def test_a_function_named_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_factory.py").write_text(
        "from tests.checkpoint.models import tiny_model\ndef build(**args): return tiny_model()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write_tiny(tmp_path / "x.safetensors")
    assert open_model(path, arch="my_factory:build").architecture.library == "caller"


@pytest.mark.parametrize(
    ("arch", "error"),
    [
        ("swinv2", "cannot read the architecture"),
        ("timm:", "cannot read the architecture"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("json:no_such_function", "has no 'no_such_function'"),
        ("json:__name__", "not a function"),
    ],
)
def test_names_that_make_no_sense(tmp_path: Path, arch: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        open_model(write_tiny(tmp_path / "x.safetensors"), arch=arch)


def test_a_name_that_timm_does_not_know_gets_suggestions(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    with pytest.raises(UnknownArchitectureError, match="did you mean swinv2_tiny_window8_256"):
        open_model(path, arch="timm:swinv2_tiny_window8_265")


def test_the_number_of_classes_comes_from_the_file(tmp_path: Path) -> None:
    args = {k: v for k, v in ARGS.items() if k != "num_classes"}
    path = write_tiny(tmp_path / "x.safetensors")
    assert open_model(path, arch=f"timm:{NAME}", arch_args=args).model.num_classes == 5


def test_the_wrong_architecture_says_what_is_missing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"only \d+ of the model's \d+ tensors.*missing: "):
        open_model(path, arch=f"timm:{NAME}", arch_args={**ARGS, "depths": [2, 2]})
    save_file({f"{k}_of_another": v for k, v in tiny_weights().items()}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"only 0 of the model's \d+ tensors"):
        open_model(tmp_path / "y.safetensors", arch=f"timm:{NAME}", arch_args=ARGS)
    with pytest.raises(CheckpointError, match="has shape"):
        open_model(path, arch=f"timm:{NAME}", arch_args={**ARGS, "embed_dim": 32})


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["head.fc.weight"] = weights["head.fc.weight"].to(torch.int8)
    save_file(weights, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"dtype torch.int8.*quantised"):
        open_model(tmp_path / "x.safetensors", arch=f"timm:{NAME}", arch_args=ARGS)


# -- bare state dicts ----------------------------------------------------------------------


def test_several_fits_are_listed_and_none_is_taken(
    tmp_path: Path, full_size: nn.Module, few_names: None
) -> None:
    torch.save(full_size.state_dict(), tmp_path / "x.pth")
    with pytest.raises(UnknownArchitectureError, match="fit 2 architectures") as caught:
        identify(read_checkpoint(tmp_path / "x.pth"))
    assert caught.value.candidates == tuple(f"timm:{name}" for name in PAIR)


def test_buffers_of_the_first_authors_reveal_the_window(
    tmp_path: Path, full_size: nn.Module, few_names: None
) -> None:
    torch.save({"model": first_authors_layout(full_size)}, tmp_path / "x.pth")
    opened = open_model(tmp_path / "x.pth")
    assert opened.architecture.name == PAIR[1]
    assert opened.architecture.args == {"num_classes": 7}
    state = full_size.state_dict()
    assert opened.stored.keys() == state.keys()
    assert all(torch.equal(opened.stored[k], v) for k, v in state.items())


def test_nothing_known_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pth")
    with pytest.raises(UnknownArchitectureError, match="--arch timm:NAME") as caught:
        identify(read_checkpoint(tmp_path / "x.pth"))
    assert caught.value.candidates == ()


# -- what a file may not do ----------------------------------------------------------------


def write_config(tmp_path: Path, **config: Any) -> Path:
    write_tiny(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", ["hf-hub:timm/x", "local-dir:/tmp", "../x", "os:system", ""])
def test_a_config_cannot_name_a_source(tmp_path: Path, name: str) -> None:
    with pytest.raises((UnknownArchitectureError, CheckpointError)):
        open_model(write_config(tmp_path, architecture=name, pretrained_cfg={}))


@pytest.mark.parametrize("argument", ["checkpoint_path", "pretrained", "cache_dir"])
def test_a_config_cannot_load_or_download(tmp_path: Path, argument: str) -> None:
    folder = write_config(tmp_path, architecture=NAME, model_args={argument: "/x"})
    with pytest.raises(UsageError, match=f"may not set {argument}"):
        open_model(folder)


def test_a_config_cannot_import(tmp_path: Path) -> None:
    before = set(sys.modules)
    for name in ("os.system", "torch.nn.Linear", "logging", "PreTrainedConfig"):
        folder = write_config(tmp_path, model_type="swinv2", architectures=[name])
        with pytest.raises(UnknownArchitectureError, match="no model class"):
            open_model(folder)
    folder = write_config(tmp_path, model_type="evil", auto_map={"AutoModel": "evil.Evil"})
    with pytest.raises(UnknownArchitectureError, match="no model type 'evil'"):
        open_model(folder)
    assert "evil" not in set(sys.modules) - before


def test_building_does_not_advance_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    build_model(Architecture("timm", NAME, ARGS))
    assert torch.equal(torch.rand(1), expected)


def test_a_model_on_meta_has_the_shapes_and_no_values() -> None:
    model = build_model(Architecture("timm", NAME, ARGS), "meta")
    shapes = {k: v.shape for k, v in model.state_dict().items()}
    assert shapes == {k: v.shape for k, v in tiny_weights().items()}
    assert all(p.is_meta for p in model.parameters())


# -- transformers --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swinv2_of_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    config = transformers.Swinv2Config(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    folder = tmp_path_factory.mktemp("hf") / "model"
    torch.manual_seed(0)
    transformers.Swinv2ForImageClassification(config).half().save_pretrained(folder)
    return folder


def test_a_folder_of_transformers(swinv2_of_transformers: Path) -> None:
    opened = open_model(swinv2_of_transformers)
    assert str(opened.architecture) == "transformers:Swinv2ForImageClassification"
    assert {p.dtype for p in opened.model.parameters()} == {torch.float32}
    assert all(v.dtype == torch.float16 for v in opened.stored.values() if v.is_floating_point())
    assert opened.stored.keys() == opened.model.state_dict().keys()
    rebuilt = build_model(Architecture.from_json(opened.architecture.to_json(), "a test"))
    rebuilt.load_state_dict(opened.stored)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(rebuilt(x).logits, opened.model(x).logits)


def test_our_own_models_take_their_sizes_from_the_config(tmp_path: Path) -> None:
    from flashbias_convert.models.alibi_gpt2 import AlibiGPT2Config, AlibiGPT2LMHeadModel

    config = AlibiGPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)
    AlibiGPT2LMHeadModel(config).save_pretrained(tmp_path)
    found = [
        identify(read_checkpoint(path), arch)
        for path in (tmp_path, tmp_path / "model.safetensors")
        for arch in (None, "alibi_gpt2")
    ]
    assert {a.name for a in found} == {"AlibiGPT2LMHeadModel"}
    assert all(a.library == "transformers" and a.args["vocab_size"] == 11 for a in found)
    bare = architecture.as_architecture("alibi_gpt2", {"vocab_size": 11})
    assert bare.args == {"model_type": "alibi_gpt2", "vocab_size": 11}


def test_a_folder_whose_config_names_a_head_that_its_weights_lack(tmp_path: Path) -> None:
    """As the folders of sentence encoders do."""
    import transformers

    config = transformers.MPNetConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=20, architectures=["MPNetForMaskedLM"],
    )  # fmt: skip
    model = transformers.MPNetModel(config).eval()
    model.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "architectures": ["MPNetForMaskedLM"]}))
    with pytest.raises(CheckpointError, match="of MPNetForMaskedLM, such as 'lm_head") as caught:
        open_model(tmp_path / "m")
    assert caught.value.hint.endswith("--arch transformers:MPNetModel")
    opened = open_model(tmp_path / "m", arch="transformers:MPNetModel")  # sizes from the config
    assert isinstance(opened.model, transformers.MPNetModel)
    key = "encoder.relative_attention_bias.weight"
    assert torch.equal(opened.model.state_dict()[key], model.state_dict()[key])


def test_the_weights_of_another_model_are_not_taken_for_one_without_a_head(
    tmp_path: Path, swinv2_of_transformers: Path
) -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=30, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    transformers.T5EncoderModel(config).save_pretrained(tmp_path / "m")
    shutil.copy(swinv2_of_transformers / "model.safetensors", tmp_path / "m")
    with pytest.raises(CheckpointError, match="of T5EncoderModel, such as") as caught:
        open_model(tmp_path / "m")
    assert caught.value.hint == "are these the weights of another model?"


def test_a_class_of_transformers_alone_has_no_sizes(
    tmp_path: Path, swinv2_of_transformers: Path
) -> None:
    shutil.copy(swinv2_of_transformers / "model.safetensors", tmp_path)
    with pytest.raises(UnknownArchitectureError, match=r"how large the model is.* no config\.json"):
        open_model(tmp_path, arch="transformers:Swinv2Model")
