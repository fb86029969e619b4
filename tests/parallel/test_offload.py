"""Patched models whose weights accelerate keeps elsewhere until they are needed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from torch import nn

from flashbias_convert import StaleTermsError
from flashbias_convert.swap import patched_modules

from .processes import VISION, model_of, outputs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
KINDS = ("to the CPU", "with its buffers", "to the disk", "by an automatic map")


def offloaded(model: nn.Module, kind: str, folder: Path, *, whole: bool = False) -> nn.Module:
    """The model as accelerate has offloaded it.

    Args:
        model: patched.
        kind: one of `KINDS`.
        folder: for what is on disk.
        whole: attention is loaded with all below it by one hook; else each layer has its own.
    """
    classes = sorted({type(site).__name__ for site in patched_modules(model)}) if whole else None
    if kind == "to the disk":
        made = disk_offload(
            model, str(folder), execution_device="cpu", preload_module_classes=classes
        )
    elif kind == "by an automatic map":
        size = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
        blocks = ["SwinTransformerV2Block", "BloomBlock", "ModuleDict"]
        places = infer_auto_device_map(
            model,
            max_memory={"cpu": size * 9 // 10, "disk": size},
            no_split_module_classes=blocks,
        )
        assert {"cpu", "disk"} == set(places.values())
        made = dispatch_model(
            model,
            {name: "disk" if place == "disk" else "cpu" for name, place in places.items()},
            main_device="cpu",
            offload_dir=str(folder),
            preload_module_classes=classes,
        )
    else:
        made = cpu_offload(
            model,
            execution_device="cpu",
            offload_buffers=kind == "with its buffers",
            preload_module_classes=classes,
        )
    assert any(parameter.is_meta for parameter in made.parameters())
    return made


@pytest.mark.parametrize("whole", [True, False], ids=["as a whole", "layer by layer"])
@pytest.mark.parametrize("name", ["toy", "swin", "bloom"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_offloaded_model_serves(tmp_path: Path, kind: str, name: str, whole: bool) -> None:
    model, x = model_of(name)
    expected = outputs(model, x)
    model = offloaded(model, kind, tmp_path, whole=whole)
    assert torch.equal(outputs(model, x), expected)
    assert torch.equal(outputs(model, x), expected)
    assert any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mpt", "falcon", "t5", *VISION])
def test_weights_that_are_read_without_a_call_are_loaded(tmp_path: Path, name: str) -> None:
    model, x = model_of(name)
    expected = outputs(model, x)
    for kind in ("to the CPU", "with its buffers"):
        away = offloaded(copy.deepcopy(model), kind, tmp_path)
        assert torch.equal(outputs(away, x), expected)
        assert torch.equal(outputs(away, x), expected)


def test_a_compiled_model_loads_them_too(tmp_path: Path) -> None:
    model, x = model_of("timm beit")
    expected = outputs(model, x)
    compiled = torch.compile(offloaded(model, "to the CPU", tmp_path), backend="eager")
    assert torch.equal(outputs(compiled, x), expected)
    assert torch.equal(outputs(compiled, x), expected)


def test_other_weights_are_noticed_where_they_are_loaded(tmp_path: Path) -> None:
    model, x = model_of("swin")
    site: Any = patched_modules(model)[0]
    model = offloaded(model, "to the CPU", tmp_path)
    outputs(model, x)
    site.cpb_mlp[0]._hf_hook.weights_map["weight"].mul_(2)
    with pytest.raises(StaleTermsError):
        outputs(model, x)


def test_what_is_on_the_meta_device_for_no_reason_is_stale() -> None:
    model, x = model_of("toy")
    patched_modules(model)[0].table = nn.Parameter(torch.empty(2, 36, 36, device="meta"))
    with pytest.raises(StaleTermsError):
        outputs(model, x)
