"""Classes of repositories, some of whose matrices are no buffers and move when they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import patch_model, unpatch_model
from tests.recipes import test_gated_audio as audio
from tests.recipes import test_jina_bert as jina
from tests.recipes import test_mosaic_bert as mosaic
from tests.support import assert_parity

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def of_jina() -> tuple[Any, tuple[Tensor, ...]]:
    model = jina.make()
    return model, jina.inputs(model)


def of_audio(make: audio.Make) -> tuple[Any, tuple[Tensor, ...]]:
    model = audio.built(make)
    return model, (audio.sound(model), audio.padding())


MAKERS = {
    "jina": of_jina,
    "mosaic": lambda: (mosaic.make(), mosaic.inputs()),
    "beats": lambda: of_audio(audio.beats),
    "wavlm": lambda: of_audio(audio.wavlm),
}


@pytest.mark.parametrize("name", list(MAKERS))
@torch.no_grad()
def test_an_encoder_that_moved_before_its_first_call(name: str, device: torch.device) -> None:
    model, call = MAKERS[name]()
    here = tuple(x.to(device) for x in call)
    plain = tensor_of(MAKERS[name]()[0].to(device)(*here)).cpu()
    wide = tuple(x.double() if x.is_floating_point() else x for x in call)
    truth = tensor_of(MAKERS[name]()[0].double()(*wide))
    model.to(device)
    assert patch_model(model).counts()["patched"] == 2
    for _ in range(2):
        out = tensor_of(model(*here))
        assert out.device == device
        assert_parity(out.cpu(), plain, truth)
    unpatch_model(model)
    assert torch.equal(tensor_of(model(*here)).cpu(), plain)


def tensor_of(out: Any) -> Tensor:
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found
