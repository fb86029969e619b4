"""Pop2Piano, Switch Transformers, LongT5 and UDOP, patched, against the originals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model, patch_model
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

transformers = pytest.importorskip("transformers")

N, VOCABULARY = 24, 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16, "decoder_start_token_id": 0, "dropout_rate": 0.1,
}  # fmt: skip
#: blocks of 4, and a global token for 4 others; the last block is not full
LONG = SIZES | {"local_radius": 3, "global_block_size": 4}
MAKE: dict[str, tuple[str, dict[str, Any]]] = {
    "pop2piano": ("Pop2Piano", SIZES),
    # one expert: which one gets a token would depend on rounding
    "switch": ("SwitchTransformers", SIZES | {"num_experts": 1}),
    "longt5": ("LongT5", LONG | {"encoder_attention_type": "local"}),
    "longt5 global": ("LongT5", LONG | {"encoder_attention_type": "transient-global"}),
    # its stack has a table of 32 entries, tied to that of layer 0
    "udop": (
        "Udop",
        SIZES | {"relative_attention_num_buckets": 32, "max_2d_position_embeddings": 64},
    ),
}
BIAS = ("relative_attention_bias.weight",)


def make(name: str) -> Any:
    family, sizes = MAKE[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    return randomised(model, relative_attention_bias=2.0, shared=1.0, lm_head=0.3)


def tokens(n: int = N, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (3, n), generator=torch.Generator().manual_seed(seed))


def padding(n: int = N) -> Tensor:
    mask = torch.ones(3, n, dtype=torch.long)
    mask[0, -7:], mask[1, -3:] = 0, 0
    return mask


def boxes(model: Any, n: int = N) -> dict[str, Tensor]:
    """Those of words on a page, which UDOP wants."""
    if not hasattr(model.config, "max_2d_position_embeddings"):
        return {}
    generator = torch.Generator().manual_seed(3)
    corners, _ = torch.randint(0, 64, (3, n, 2, 2), generator=generator).sort(dim=2)
    dtype = next(model.parameters()).dtype
    return {"bbox": (corners / 64).flatten(2).to(dtype)}  # of which every dtype knows the middle


def case(name: str, padded: bool, n: int = N) -> Case:
    def run(model: Any) -> Tensor:
        seen = padding(n) if padded else None
        found = model(
            input_ids=tokens(n), attention_mask=seen, decoder_input_ids=tokens(11, seed=2),
            decoder_attention_mask=padding(11) if padded else None, **boxes(model, n),
        )  # fmt: skip
        parts = []
        for states, mask in (
            (found.encoder_last_hidden_state, seen),
            (found.logits, padding(11) if padded else None),
        ):
            real = states if mask is None else states[mask.bool()]
            parts.append((real / real.detach().abs().max()).flatten())
        return torch.cat(parts)

    return Case(lambda: make(name), run, BIAS, {"patched": 4, "left alone": 2})


CASES = {f"{name}{' padded' * p}": case(name, bool(p)) for name in MAKE for p in (0, 1)}
CASES["longt5, blocks not full"] = case("longt5", True, n=22)
CASES["longt5 global, blocks not full"] = case("longt5 global", True, n=22)
#: where no key of a block is real, the softmax of the original divides zero by zero in float16
MASKED_BY_TEN_BILLIONS = ("longt5 padded", "longt5, blocks not full")


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    if dtype == torch.float16 and name in MASKED_BY_TEN_BILLIONS:
        require_finite(CASES[name], dtype)
    parity.check_values(CASES[name], dtype, backend)


def require_finite(case: Case, dtype: torch.dtype) -> None:
    """Skip where the original gives no numbers: ten billions are infinite in half precision."""
    if not case.output(case.make().to(dtype)).isfinite().all():
        pytest.skip(f"the original gives NaN in {dtype}")


@pytest.mark.parametrize("name", MASKED_BY_TEN_BILLIONS)
def test_half_precision_is_right_where_the_original_gives_no_numbers(name: str) -> None:
    case = CASES[name]
    model = case.make().half()
    truth = case.truth(model)
    case.patched(model, "eager")
    assert (case.output(model) - truth).abs().max() < 0.02 * truth.abs().max()


@pytest.mark.parametrize("name", [f"{name} padded" for name in MAKE])
def test_comes_and_goes(name: str) -> None:
    parity.check_comes_and_goes(CASES[name])


@pytest.mark.parametrize("name", [f"{name} padded" for name in MAKE])
def test_training_is_the_original(name: str) -> None:
    parity.check_training(CASES[name])


@pytest.mark.parametrize("name", [f"{name} padded" for name in MAKE])
def test_other_weights_bring_their_bias(name: str) -> None:
    parity.check_follows_weights(CASES[name])


@pytest.mark.parametrize("name", MAKE)
def test_a_folder_converts_and_loads(name: str, tmp_path: Path) -> None:
    parity.check_folder(CASES[name], tmp_path)


@pytest.mark.parametrize("name", MAKE)
def test_attention_weights_come_from_the_original(name: str) -> None:
    def run(model: Any) -> Any:
        model.set_attn_implementation("eager")
        out = model(
            tokens(), attention_mask=padding(), decoder_input_ids=tokens(11, seed=2),
            output_attentions=True, **boxes(model),
        )  # fmt: skip
        return out.logits, out.encoder_attentions, out.decoder_attentions, out.cross_attentions

    parity.check_attention_weights(CASES[name], run)


@pytest.mark.parametrize("name", [name for name in MAKE if name != "pop2piano"])
def test_generate(name: str) -> None:
    """Pop2Piano wants a composer."""
    model = make(name)
    settings: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    settings |= {"attention_mask": padding(), **boxes(model)}
    plain = model.generate(tokens(), **settings)
    patch_model(model, backend="sdpa")
    assert torch.equal(model.generate(tokens(), **settings), plain)


def test_an_encoder_of_longt5_may_be_converted_in_part() -> None:
    """Its layers hand on the same bias as before."""
    one = CASES["longt5 global padded"]
    model = one.make()
    plain = one.output(model)
    plan = patch_model(model, exclude=["re:encoder.block.0.*"], backend="sdpa", force_all=True)
    assert plan.counts() == {"patched": 3, "left alone": 3}
    torch.testing.assert_close(one.output(model), plain, rtol=1e-4, atol=1e-5)


def test_sizes_of_a_block() -> None:
    plan = inspect_model(make("longt5 global"), tokens=64)
    assert [(s.n, s.m) for s in plan.patched if s.name.startswith("encoder")] == [(4, 12 + 16)] * 2
