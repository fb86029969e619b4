"""`save_pretrained` gives terms the names of old checkpoints; they are found under those, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from flashbias_convert import FlashBiasConfig, load_model, patch_model
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.checkpoint.transformers_names import by_sites
from flashbias_convert.swap import patched_modules

from .streaming.test_renamed_by_transformers import ALL, MODELS, write

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@torch.no_grad()
def run(model: Any) -> Tensor:
    torch.manual_seed(1)
    out: Tensor = model.eval()(torch.randn(2, 3, 32, 32))[0]
    return out


@pytest.mark.parametrize("name", MODELS)
def test_what_save_pretrained_wrote_is_loaded(tmp_path: Path, name: str) -> None:
    _, model = write(tmp_path / "m", name)
    sites = len(patch_model(model, method="exact").patched)
    model.save_pretrained(tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    assert len(patched_modules(loaded)) == sites > 0
    assert torch.equal(run(loaded), run(model))


@pytest.mark.parametrize("how", ["class", "base"])
@pytest.mark.parametrize("name", ["Swin", "BEiT"])
def test_from_pretrained_finds_them_too(tmp_path: Path, name: str, how: str) -> None:
    source, _ = write(tmp_path / "m", name)
    convert_checkpoint(source, tmp_path / "out", **ALL)
    model: Any = load_model(tmp_path / "out")
    model.save_pretrained(tmp_path / "saved")
    cls = type(model) if how == "class" else transformers.AutoModel
    loaded = cls.from_pretrained(tmp_path / "saved", quantization_config=FlashBiasConfig())
    assert len(patched_modules(loaded)) == len(patched_modules(model))
    assert torch.equal(run(loaded), run(model if how == "class" else model.base_model))


def test_terms_keep_names_that_the_model_has(tmp_path: Path) -> None:
    _, model = write(tmp_path / "m", "BEiT")
    patch_model(model, method="exact")
    model.save_pretrained(tmp_path / "saved")
    state = {key: t for key, t in model.state_dict().items() if "score_bias." in key}
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    terms = {key: tensor for key, tensor in saved.items() if "score_bias." in key}
    assert terms.keys() != state.keys() == by_sites(terms, model).keys()
    assert by_sites(state, model).keys() == state.keys()
    assert by_sites(terms, torch.nn.Identity()) == terms
