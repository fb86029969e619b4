"""What a file says never makes the library ask the network or run code."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub import constants

from flashbias_convert.checkpoint import Architecture, build_model, open_model
from flashbias_convert.checkpoint.architecture import from_config
from flashbias_convert.errors import UnknownArchitectureError, UsageError

from .models import write_tiny

BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 9,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that opens a connection is recorded and fails."""
    asked: list[Any] = []

    def connect(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return asked


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "timm_backbone", "backbone": "hf-hub:evil/model"},
        {"model_type": "timm_backbone", "backbone": "evil/model"},
        {"model_type": "timm_wrapper", "architecture": "hf-hub:evil/model"},
        {"model_type": "detr", "backbone": "evil/model", "use_timm_backbone": False},
        {
            "model_type": "detr",
            "backbone_config": {"model_type": "timm_backbone", "backbone": "local-dir:/evil"},
        },
        {
            "model_type": "timm_wrapper",
            "architecture": "resnet18",
            "model_args": {"checkpoint_path": "/evil.pth"},
        },
    ],
)
def test_parts_from_elsewhere_are_refused(no_network: list[Any], config: dict[str, Any]) -> None:
    classes = {"timm_backbone": "TimmBackbone", "timm_wrapper": "TimmWrapperModel"}
    name = classes.get(config["model_type"], "DetrModel")
    with pytest.raises(UnknownArchitectureError, match=r"nothing is ever downloaded|may not set"):
        build_model(Architecture("transformers", name, config, origin="the plan"))
    assert no_network == []


@pytest.mark.parametrize(
    "entry",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"auto_map": {"AutoModel": "evil/model--modeling.Evil"}},
        {"trust_remote_code": True},
    ],
    ids=lambda entry: next(iter(entry)),
)
def test_entries_that_name_code_are_dropped(no_network: list[Any], entry: dict[str, Any]) -> None:
    (key,) = entry
    nested = {**BERT, **entry, "sub": [{**entry, "kept": 1}]}
    assert from_config(nested, "x").args == {**BERT, "sub": [{"kept": 1}]}
    model: Any = build_model(Architecture("transformers", "BertModel", {**BERT, **entry}))
    assert "evil" not in str(getattr(model.config, key, ""))
    assert no_network == []


def test_the_hub_is_offline_while_a_model_is_built(
    no_network: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(self: Any, *args: Any) -> None:
        from huggingface_hub import HfApi

        HfApi().model_info("evil/model")

    monkeypatch.setattr(transformers.BertModel, "__init__", asks)
    with pytest.raises(UsageError, match="OfflineModeIsEnabled"):
        build_model(Architecture("transformers", "BertModel", BERT))
    assert no_network == []
    assert constants.HF_HUB_OFFLINE is False


def test_a_config_without_a_class_gets_a_hint(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model.safetensors")
    config = {"model_type": "encoder-decoder", "encoder": BERT, "decoder": BERT}
    for content in (config, {"model_type": "timm_backbone_x"}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(UnknownArchitectureError, match=re.escape("transformers:CLASS")):
            open_model(tmp_path)
