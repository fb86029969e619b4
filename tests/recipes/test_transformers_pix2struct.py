"""The text decoder of Pix2Struct, alone and behind its encoder, patched, against the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.models.caches import CACHE_FIELD
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

transformers = pytest.importorskip("transformers")

N, VOCABULARY, PATCHES = 21, 97, 10
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "patch_embed_hidden_size": 24, "d_ff": 32, "d_kv": 8,
    "num_hidden_layers": 1, "num_attention_heads": 4, "seq_len": 16,
}  # fmt: skip
BIAS = ("relative_attention_bias.weight",)


def decoder(**changes: Any) -> Any:
    # which the class of the decoder reads, and that of its config has not got
    config = transformers.Pix2StructTextConfig(**TEXT | {"initializer_range": 0.02} | changes)
    made = transformers.Pix2StructTextModel(config)
    return randomised(made, relative_attention_bias=2.0, embed_tokens=1.0, lm_head=0.3)


def whole() -> Any:
    config = transformers.Pix2StructConfig(text_config=TEXT, vision_config=VISION)
    made = transformers.Pix2StructForConditionalGeneration(config)
    return randomised(made, relative_attention_bias=2.0, embed_tokens=1.0, lm_head=0.3)


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (3, N), generator=torch.Generator().manual_seed(1))


def padding(left: bool = False) -> Tensor:
    mask = torch.ones(3, N, dtype=torch.long)
    mask[0, -7:], mask[1, -3:] = 0, 0
    return mask.flip(1) if left else mask


def image(model: Any) -> dict[str, Tensor]:
    """Patches with their row and column, and which of them are some."""
    generator = torch.Generator().manual_seed(3)
    patches = torch.randn(3, PATCHES, 24, generator=generator)
    places = torch.stack([torch.arange(PATCHES) // 5 + 1, torch.arange(PATCHES) % 5 + 1], -1)
    patches = torch.cat([places.expand(3, -1, -1).float(), patches], -1).bfloat16().half()
    mask = torch.ones(3, PATCHES)
    mask[2, -4:] = 0
    return {"flattened_patches": patches.to(next(model.parameters()).dtype), "attention_mask": mask}


def alone(mask: Tensor | None) -> Case:
    def run(model: Any) -> Tensor:
        logits: Tensor = model(tokens(), attention_mask=mask, use_cache=False).logits
        return logits if mask is None else logits[mask.bool()]

    return Case(decoder, run, BIAS, {"patched": 2, "left alone": 2})


def reads(model: Any) -> Tensor:
    found = model(
        **image(model), decoder_input_ids=tokens(), decoder_attention_mask=padding()
    ).logits
    logits: Tensor = found[padding().bool()]
    return logits


def in_steps(model: Any) -> Tensor:
    """Five tokens, then one after the other, with what the cache holds."""
    cache, parts, n = None, [], 0
    for size in (5, 1, 1, 3):
        found = model(tokens()[:, n : n + size], use_cache=True, **{CACHE_FIELD: cache})
        cache, n = found[CACHE_FIELD], n + size
        parts.append(found.logits)
    return torch.cat(parts, dim=1)


COUNTS = {"patched": 2, "left alone": 2}
CASES = {
    "decoder": alone(None),
    "decoder padded": alone(padding()),
    "decoder padded on the left": alone(padding(left=True)),
    "decoder in steps": Case(decoder, in_steps, BIAS, COUNTS),
    "whole": Case(whole, reads, BIAS, COUNTS),
}


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


@pytest.mark.parametrize("name", ["decoder padded", "whole"])
def test_changes(name: str) -> None:
    parity.check_comes_and_goes(CASES[name])
    parity.check_training(CASES[name])
    parity.check_follows_weights(CASES[name])


def test_a_folder_converts_and_loads(tmp_path: Path) -> None:
    parity.check_folder(CASES["whole"], tmp_path)


def test_attention_weights_come_from_the_original() -> None:
    def run(model: Any) -> Any:
        out = model(tokens(), attention_mask=padding(), output_attentions=True)
        return out.logits, out.attentions

    def make() -> Any:
        model = decoder()
        model.set_attn_implementation("eager")
        return model

    parity.check_attention_weights(Case(make, reads, BIAS, COUNTS), run)


def test_generate() -> None:
    model = whole()
    settings: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    plain = model.generate(**image(model), **settings)
    patch_model(model, backend="sdpa")
    assert torch.equal(model.generate(**image(model), **settings), plain)


def test_a_model_that_looks_both_ways_is_unsupported() -> None:
    plan = inspect_model(decoder(is_decoder=False))
    assert "unsupported" in plan.counts() and "patched" not in plan.counts()
