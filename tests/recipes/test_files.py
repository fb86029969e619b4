"""Files of tiny models of many recipes: loaded, they compute what the patched model did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import load_model, patch_model, save_model
from flashbias_convert.swap import patched_modules
from tests.recipes import parity

for library in ("timm", "torchvision", "transformers"):
    pytest.importorskip(library)

from tests.recipes import (  # noqa: E402
    test_hat_overlap,
    test_jaketae_alibi,
    test_jina_bert,
    test_monai,
    test_mosaic_bert,
    test_timm_rel_pos,
    test_timm_windows,
    test_torchvision_maxvit,
    test_torchvision_swin,
    test_transformers_beit,
    test_transformers_swin,
    test_window_attention,
    test_zoedepth,
)

_SWINS = {case.name: case for case in test_transformers_swin.CASES}
WEIGHTED = [
    test_timm_rel_pos.COATNET,
    test_timm_rel_pos.CASES[1],
    test_timm_rel_pos.TINY,
    test_timm_windows.CR,
    test_timm_windows.GC,
    test_torchvision_maxvit.MAXVIT,
    *(test_torchvision_swin.V1, test_torchvision_swin.V2, test_torchvision_swin.V3D),
    test_transformers_beit.DPT,
    test_zoedepth.CASES[0],
    *test_window_attention.CASES,
    test_hat_overlap.HALF,
    *test_monai.CASES,
    *(_SWINS[name] for name in ("MaskFormer", "CLAP", "Swin2SR")),
]

#: terms that are closed forms, or made in each call: (model, its output)
Made = tuple[Callable[[], Any], Callable[[Any], Tensor]]
OTHERS: dict[str, Made] = {
    "MViT of torchvision": (test_torchvision_maxvit.make_mvit, test_torchvision_maxvit.video),
    "jaketae": (lambda: test_jaketae_alibi.Model(causal=True).eval(), test_jaketae_alibi.run),
    "MosaicBERT": (test_mosaic_bert.make, lambda model: model(*test_mosaic_bert.inputs())),
    "Jina-BERT": (test_jina_bert.CASES["kept"].make, test_jina_bert.CASES["kept"].run),
}


def reload(model: Any, arch: Callable[[], Any], folder: Path) -> Any:
    """What a file of a patched model says, in a new model whose weights are others."""
    save_model(model, folder / "model.safetensors")
    loaded = load_model(folder / "model.safetensors", arch=arch, backend="sdpa")
    assert len(patched_modules(loaded)) == len(patched_modules(model)) > 0
    return loaded


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_terms_made_of_weights(case: parity.Case, tmp_path: Path) -> None:
    model, x = case.model(), case.inputs()
    case.patch(model)

    def other() -> Any:
        made = case.make().eval()
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter)
        return made

    loaded = reload(model, other, tmp_path)
    assert torch.equal(case.output(loaded, x), case.output(model, x))


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_terms_of_another_kind(name: str, tmp_path: Path) -> None:
    make, run = OTHERS[name]
    model = make()
    patch_model(model, backend="sdpa", force_all=True)
    loaded = reload(model, make, tmp_path)
    assert torch.equal(run(loaded), run(model))
