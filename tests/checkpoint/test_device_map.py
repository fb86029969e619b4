"""`from_pretrained(device_map=...)`: a model of which a part stays on disk is converted, too."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_module

from flashbias_convert import FlashBiasConfig, inspect_model, patch_model, unpatch_model
from flashbias_convert.swap import patched_modules
from tests.probing import architectures as a
from tests.support import assert_parity
from tests.toy import TOY, make_input, make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def shared_beit() -> a.Made:
    return a.beit_of_transformers("use_shared_relative_position_bias")


#: from what the model itself, an owner and a child that is not called make a bias
MODELS: dict[str, Callable[[], a.Made]] = {
    "BLOOM: no weights": a.bloom,
    "T5: layer 0 makes a table": a.t5,
    "Swin: a table of the site": a.swin_of_transformers,
    "BEiT: a table of a child": a.beit_of_transformers,
    "BEiT: a table of the model": shared_beit,
    "WavLM: weights of children that are not called": a.wavlm,
}


@torch.no_grad()
def run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(**inputs)[0]
    return out


def double(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return run(copy.deepcopy(model).double(), wide)


def split(cls: Any, folder: Path, offload: Path, share: float = 0.5, **options: Any) -> Any:
    """The model with its first half in memory and the rest on disk."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    memory = {"cpu": int(size * share), "disk": 10**9}
    model = cls.from_pretrained(
        folder, device_map="auto", max_memory=memory, offload_folder=str(offload), **options
    )
    assert "disk" in model.hf_device_map.values()
    return model


def calls_of(model: nn.Module) -> Counter[int]:
    """How often the terms of each site were used, counted from now on."""
    calls: Counter[int] = Counter()
    for i, site in enumerate(patched_modules(model)):
        site.score_bias.register_forward_hook(lambda *_, i=i: calls.update([i]))
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_two_places_is_converted(name: str, tmp_path: Path) -> None:
    model, inputs = MODELS[name]()
    model.save_pretrained(tmp_path / "original")
    plain, truth = run(model, inputs), double(model, inputs)
    options: dict[str, Any] = {"method": "exact", "force_all": True, "backend": "eager"}
    config = FlashBiasConfig(**options)
    loaded = split(type(model), tmp_path / "original", tmp_path / "off", quantization_config=config)
    patch_model(model, **options)
    sites = patched_modules(loaded)
    assert len(sites) == len(patched_modules(model)) > 0
    assert any(p.is_meta for site in sites for p in site.parameters())
    calls = calls_of(loaded)
    for _ in range(2):  # nothing is stale after the weights were dropped
        assert_parity(run(loaded, inputs), plain, truth)
        assert torch.equal(run(loaded, inputs), run(model, inputs))
    assert calls == {i: 4 for i in range(len(sites))}
    assert any(p.is_meta for site in sites for p in site.parameters())  # and were dropped again


@pytest.mark.parametrize("name", ["BLOOM: no weights", "BEiT: a table of a child"])
def test_patching_and_unpatching_what_is_dispatched(name: str, tmp_path: Path) -> None:
    model, inputs = MODELS[name]()
    model.save_pretrained(tmp_path / "original")
    loaded = split(type(model), tmp_path / "original", tmp_path / "off")
    expected = run(loaded, inputs)
    planned = inspect_model(loaded, method="exact", force_all=True)
    assert {site.status for site in planned.sites} == {"patched"}
    patch_model(loaded, method="exact", force_all=True, backend="eager")
    once, calls = run(loaded, inputs), calls_of(loaded)
    patch_model(loaded, method="exact", force_all=True, backend="eager")
    assert torch.equal(run(loaded, inputs), once)
    assert not calls, "the terms of the first call are still used"
    unpatch_model(loaded)
    assert torch.equal(run(loaded, inputs), expected)
    assert not patched_modules(loaded)


def test_a_converted_folder_keeps_its_terms(tmp_path: Path) -> None:
    model, inputs = a.swin_of_transformers()
    patch_model(model, method="exact", force_all=True, backend="eager")
    model.save_pretrained(tmp_path / "m")
    config = FlashBiasConfig(backend="eager")
    loaded = split(type(model), tmp_path / "m", tmp_path / "off", quantization_config=config)
    assert len(patched_modules(loaded)) == len(patched_modules(model))
    for _ in range(2):
        assert torch.equal(run(loaded, inputs), run(model, inputs))


def test_a_model_that_stays_as_it_was_is_told(tmp_path: Path) -> None:
    model, _ = a.swin_of_transformers()
    model.save_pretrained(tmp_path / "m")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = type(model).from_pretrained(
            tmp_path / "m", quantization_config=FlashBiasConfig(exclude=["re:.*"])
        )
    assert not patched_modules(loaded)
    assert any("0 of 2 attention sites were converted" in str(w.message) for w in caught)
    assert any("left alone: " in str(w.message) for w in caught)


# -- models that others dispatched -----------------------------------------------------------


def test_a_hook_that_is_taken_off_leaves_the_patched_forward() -> None:
    model, x = make_model(), make_input()
    plain = model(x)
    cpu_offload(model, execution_device="cpu")
    patch_model(model, recipes=[TOY], method="exact", force_all=True)
    assert all(site.score_bias.layout.device.type == "cpu" for site in patched_modules(model))
    calls = calls_of(model)
    with torch.no_grad():
        hooked = model(x)
        remove_hook_from_module(model, recurse=True)
        assert torch.equal(model(x), hooked)
    assert set(calls.values()) == {2}
    unpatch_model(model)
    assert torch.equal(model(x), plain)
    assert set(calls.values()) == {2}


def test_a_forward_that_something_else_replaced_is_refused() -> None:
    model = make_model()
    site = model.blocks[0]["attn"]
    before = site.forward
    site.forward = lambda x: before(x)
    cpu_offload(model, execution_device="cpu")
    plan = inspect_model(model, recipes=[TOY], force_all=True)
    reasons = [s.reason for s in plan.sites if s.status == "unsupported"]
    assert len(reasons) == 1 and "replaced on the instance" in reasons[0]


def test_weights_that_cannot_be_read_are_a_reason(tmp_path: Path) -> None:
    model = make_model()
    disk_offload(model, str(tmp_path), execution_device="cpu")
    for file in tmp_path.glob("*.dat"):
        file.unlink()
    plan = inspect_model(model, recipes=[TOY], force_all=True)
    assert {site.status for site in plan.sites} == {"failed"}
    assert all(".dat" in site.reason for site in plan.sites)


def test_buffers_that_move_by_their_names_are_a_reason() -> None:
    model = make_model()
    block = type(model.blocks[0]["attn"]).__name__
    cpu_offload(model, execution_device="cpu", offload_buffers=True, preload_module_classes=[block])
    plan = inspect_model(model, recipes=[TOY], force_all=True)
    assert {site.status for site in plan.sites} == {"unsupported"}
    assert all("accelerate offloads its buffers" in site.reason for site in plan.sites)
