"""The audio encoder of Phi-4-multimodal, patched, against the original, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.modules import ScoreBiasModule
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, NoSquares, randomised

transformers = pytest.importorskip("transformers")

#: frames of sound, of which the encoder makes one of four
FRAMES = 80


def phi4(**changes: Any) -> Any:
    config = transformers.Phi4MultimodalAudioConfig(
        **{
            "hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 4,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 16,
            "nemo_conv_channels": 4, "time_reduction": 4, "bias_max_distance": 12,
        } | changes
    )  # fmt: skip
    model = transformers.Phi4MultimodalAudioModel(config)
    return randomised(model, embed=0.7, bias_values=2.0, v_proj=0.5, o_proj=0.5)


def phi4_case(padded: bool, batch: int = 2, frames: int = FRAMES, **changes: Any) -> Case:
    def run(model: Any) -> Tensor:
        shape = (batch, frames, model.config.input_size)
        sound = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        sound = sound.bfloat16().half().to(next(model.parameters()).dtype)
        mask = torch.ones(batch, frames, dtype=torch.bool)
        mask[0, frames * 5 // 8 :] = False
        out: Tensor = model(sound, mask if padded else None)
        return out  # frames of padding, too: the original does not hide them either

    counts = {"patched": changes.get("num_blocks", 2)}
    return Case(lambda: phi4(**changes), run, ("bias_values.weight",), counts)


SHORT = {
    "alone": phi4_case(padded=False),
    "padded": phi4_case(padded=True),
    "symmetric": phi4_case(padded=True, bias_symmetric=True, bias_max_distance=20),
}
CASES = SHORT | {  # of several pieces the original takes no batch
    "in pieces": phi4_case(padded=False, batch=1, frames=2100, num_blocks=1),
    "in pieces, padded": phi4_case(padded=True, batch=1, frames=2100, num_blocks=1),
}


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", SHORT)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SHORT])
def test_audio_that_is_cut_into_pieces(name: str) -> None:
    parity.check_values(CASES[name], torch.float32)


@torch.no_grad()
def test_the_mask_is_added_and_not_dropped() -> None:
    """As the original does it: padding keeps its place, with one less."""
    model = phi4()
    patch_model(model, backend="sdpa", force_all=True)
    found = [CASES[name].output(model) for name in ("alone", "padded")]
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_comes_and_goes() -> None:
    parity.check_comes_and_goes(CASES["padded"])


def test_training_is_the_original() -> None:
    parity.check_training(CASES["padded"], together=True)


def test_other_weights_bring_their_bias() -> None:
    parity.check_follows_weights(CASES["padded"])


def test_a_folder_converts_and_loads(tmp_path: Path) -> None:
    parity.check_folder(CASES["padded"], tmp_path)


def test_nothing_of_quadratic_size_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the kernel: the backends that run on a CPU do make scores."""
    # narrow, so that nothing else is as large as the square of 450 frames
    case = phi4_case(
        padded=True, frames=900, hidden_size=8, num_attention_heads=2, intermediate_size=8,
        ext_pw_out_channel=8, depthwise_separable_out_channel=8, input_size=4, time_reduction=2,
    )  # fmt: skip
    model = case.make()
    patch_model(model, backend="sdpa")
    monkeypatch.setattr(ScoreBiasModule, "forward", lambda self, q, k, v, **kwargs: q.clone())
    with NoSquares(450):
        case.output(model)


@torch.no_grad()
def test_compiles_in_one_graph() -> None:
    one = CASES["padded"]
    model = one.make()
    one.patched(model)
    expected = one.output(model)
    torch.compiler.reset()
    assert torch.equal(one.run(torch.compile(model, backend="eager", fullgraph=True)), expected)


def test_an_encoder_that_streams_is_unsupported() -> None:
    plan = inspect_model(phi4(chunk_size=8))
    assert plan.counts() == {"unsupported": 2} and "chunks of 8" in plan.sites[0].reason


def test_longer_pieces_are_not_planned_for() -> None:
    assert {(s.n, s.m) for s in inspect_model(phi4(), tokens=3000).sites} == {(500, 500)}
