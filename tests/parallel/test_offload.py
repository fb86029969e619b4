"""Patched models whose weights accelerate keeps elsewhere until they are needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from torch import nn

from flashbias_convert.swap import patched_modules

from .processes import model_of, outputs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
KINDS = ("to the CPU", "with its buffers", "to the disk", "by an automatic map")


def offloaded(model: nn.Module, kind: str, folder: Path) -> nn.Module:
    # timm's attention takes the weights of its own children, which only this loads in time
    whole = sorted({type(site).__name__ for site in patched_modules(model)})
    if kind == "to the disk":
        made = disk_offload(
            model, str(folder), execution_device="cpu", preload_module_classes=whole
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
            preload_module_classes=whole,
        )
    else:
        made = cpu_offload(
            model,
            execution_device="cpu",
            offload_buffers=kind == "with its buffers",
            preload_module_classes=whole,
        )
    assert any(parameter.is_meta for parameter in made.parameters())
    return made


@pytest.mark.parametrize("name", ["toy", "swin", "bloom"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_offloaded_model_serves(tmp_path: Path, kind: str, name: str) -> None:
    model, x = model_of(name)
    expected = outputs(model, x)
    model = offloaded(model, kind, tmp_path)
    assert torch.equal(outputs(model, x), expected)
    assert torch.equal(outputs(model, x), expected)


def test_what_is_on_the_meta_device_for_no_reason_is_stale() -> None:
    from flashbias_convert import StaleTermsError

    model, x = model_of("toy")
    patched_modules(model)[0].table = nn.Parameter(torch.empty(2, 36, 36, device="meta"))
    with pytest.raises(StaleTermsError):
        outputs(model, x)
