"""Trained terms in files: what was learnt comes back, and says that it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert import Plan, load_model, save_model
from flashbias_convert.checkpoint.restore import restore_checkpoint
from flashbias_convert.errors import CheckpointError
from tests.toy import TOY

from .models import attention, run, step, terms, train_terms, undropped

LOAD: dict[str, Any] = {"arch": undropped, "recipes": [TOY], "backend": "eager"}


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_saved_model_trains_on_where_it_was(tmp_path: Path, with_plan: bool) -> None:
    model = undropped()
    plan = train_terms(model)
    step(model, 2)
    file = tmp_path / "model.safetensors"
    save_model(model, file, arch=undropped, plan=plan if with_plan else None, recipes=[TOY])
    written = Plan.from_json(json.loads(file.with_suffix(".plan.json").read_text()))
    assert all(site.trains_terms() for site in written.patched)
    other = load_model(file, **LOAD)
    assert torch.equal(run(other), run(model))
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n, p in other.named_parameters() if p.requires_grad} == wanted
    assert torch.equal(run(step(other)), run(step(model)))


def test_any_other_way_of_saving_keeps_them(tmp_path: Path) -> None:
    model = undropped()
    train_terms(model)
    step(model, 2)
    file = tmp_path / "model.pt"
    torch.save(model.state_dict(), file)
    other = load_model(file, **LOAD)
    assert attention(other).trains_terms
    assert torch.equal(run(other), run(model))
    assert torch.equal(run(step(other)), run(step(model)))


def test_a_state_dict_saved_in_training_is_not_stale(tmp_path: Path) -> None:
    model: Any = undropped()
    train_terms(model)
    step(model, 2).train()
    state = model.state_dict()
    model.eval()
    fresh = undropped()
    train_terms(fresh)
    fresh.load_state_dict(state)
    assert torch.equal(run(fresh), run(model))
    for key, value in terms(fresh).items():
        assert torch.equal(value, state[key])


def test_there_is_no_original_to_restore(tmp_path: Path) -> None:
    model = undropped()
    train_terms(model)
    save_model(model, tmp_path / "model.safetensors", arch=undropped, recipes=[TOY])
    with pytest.raises(CheckpointError, match=r"2 sites .* were trained"):
        restore_checkpoint(tmp_path / "model.safetensors")
    assert not (tmp_path / "model.restored.safetensors").exists()


def test_a_state_dict_of_trained_terms_fits_trained_terms_only(tmp_path: Path) -> None:
    from flashbias_convert import patch_model

    model, plain = undropped(), undropped()
    train_terms(model)
    patch_model(plain, recipes=[TOY], method="svd", energy=0.9, backend="eager")
    with pytest.raises(RuntimeError, match="size mismatch"):
        plain.load_state_dict(model.state_dict())
