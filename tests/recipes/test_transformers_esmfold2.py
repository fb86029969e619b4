"""The diffusion of EsmFold2, patched, against the original, with random weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import load_model, patch_model, save_model
from flashbias_convert.modules import ScoreBiasModule
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

transformers = pytest.importorskip("transformers")

N, DIM, PAIR = 18, 32, 12


def config() -> Any:
    diffusion = {
        "hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 32, "atom_encoder": {"output_dim": DIM},
    }  # fmt: skip
    made = transformers.EsmFold2Config(
        pairwise_hidden_size=PAIR, structure_head={"diffusion_module": diffusion}
    )
    made._attn_implementation = "sdpa"
    return made


def modeling() -> Any:
    return importlib.import_module("transformers.models.esmfold2.modeling_esmfold2")


class Steps(nn.Module):
    """Two layers of the original's attention; its norms compute in float32 whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        settings = config()
        attention = modeling().EsmFold2DiffusionAttention
        diffusion = settings.structure_head.diffusion_module
        self.layers = nn.ModuleList([attention(settings, diffusion) for _ in range(2)])
        self.pair_bias_proj = nn.Linear(PAIR, 4, bias=False)

    def forward(self, x: Tensor, pairs: Tensor, seen: Tensor | None) -> Tensor:
        bias = self.pair_bias_proj(pairs).permute(0, 3, 1, 2)
        if seen is not None:  # as the original's layer folds it in
            lowest = torch.finfo(bias.dtype).min
            bias = bias + torch.zeros_like(seen, dtype=bias.dtype).masked_fill(~seen, lowest)
        for layer in self.layers:
            x = x + layer(x, bias)[0]
        return x


def inputs(dtype: torch.dtype, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, pairs = (
        torch.randn(size, generator=generator).bfloat16().half().to(dtype)
        for size in ((batch, N, DIM), (batch, N, N, PAIR))
    )
    seen = torch.ones(batch, 1, 1, N, dtype=torch.bool)
    seen[0, ..., -5:] = False
    return x, pairs, seen


def run(model: Any, padded: bool) -> Tensor:
    x, pairs, seen = inputs(next(model.parameters()).dtype)
    out: Tensor = model(x, pairs, seen if padded else None)
    return out[seen[:, 0, 0]]


def steps() -> Any:
    return randomised(Steps(), pair_bias=1.0)


BIAS = ("pair_bias_proj.weight",)
PADDED = Case(steps, lambda model: run(model, padded=True), BIAS, {"patched": 2})
CASES = {
    "steps": Case(steps, lambda model: run(model, padded=False), BIAS, {"patched": 2}),
    "padded": PADDED,
}


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


def test_changes() -> None:
    parity.check_comes_and_goes(PADDED)
    parity.check_training(PADDED)
    parity.check_follows_weights(PADDED)


def test_a_file_loads(tmp_path: Path) -> None:
    model = PADDED.make()
    PADDED.patched(model)
    save_model(model, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path / "model.safetensors", arch=steps, backend="sdpa")
    assert torch.equal(PADDED.output(loaded), PADDED.output(model))


def test_the_token_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One structure's bias serves several samples, and the gate is the kernel's to apply."""
    model = randomised(modeling().EsmFold2DiffusionTransformer(config()), pair_bias=1.0)
    _, pairs, seen = inputs(torch.float32, batch=1)
    states, single = torch.randn(2, 3, N, DIM, generator=torch.Generator().manual_seed(2))
    counted: list[Any] = []
    forward = ScoreBiasModule.forward

    def count(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        counted.append((kwargs["built"]["dense"]["bias"].shape, kwargs["gate"].shape))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ScoreBiasModule, "forward", count)
    with torch.no_grad():
        biases = model.compute_pair_biases(pairs, seen[:, 0, 0])
        plain = model(states, single, biases)
        plan = patch_model(model, backend="sdpa", force_all=True)
        assert plan.counts() == {"patched": 2}
        torch.testing.assert_close(model(states, single, biases), plain)
        unbiased = model(states, single, [torch.zeros_like(bias) for bias in biases])
    assert counted[:2] == [((1, 4, N, N), (3, 4, N, DIM // 4))] * 2
    assert (unbiased - plain).abs().max() > 0.1
