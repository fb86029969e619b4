"""Models of transformers that are set to the registered attention, against their eager selves."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from flashbias_convert import patch_model, register_attention, unpatch_model
from tests.interface_models import RUNS, image, make, padding, tokens
from tests.support import Float64Throughout, assert_parity, nudged

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: with Triton's interpreter, every call must be one of the kernels
KERNELS = "triton" if INTERPRETED else "sdpa"
NAME = register_attention("tested_bias", backend=KERNELS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the calls of `flashbias_attention` that come from models."""
    from flashbias_convert import attention_interface

    seen: list[dict[str, Any]] = []
    original = attention_interface.flashbias_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, bias: Any, **options: Any) -> Tensor:
        seen.append({"bias": bias, **options})
        return original(q, k, v, bias, **options)

    monkeypatch.setattr(attention_interface, "flashbias_attention", noted)
    return seen


def set_to(name: str, implementation: str) -> Any:
    """A model that is switched after it was made; some refuse it, and are made anew."""
    model = make(name)
    model.set_attn_implementation(implementation)
    configs = (module.config for module in model.modules() if hasattr(module, "config"))
    done = all(config._attn_implementation == implementation for config in configs)
    return model if done else make(name, implementation)


def truth(model: Any, run: Any) -> Tensor:
    """What the model computes in float64."""
    with Float64Throughout():
        out: Tensor = run(copy.deepcopy(model).double())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RUNS)
@torch.no_grad()
def test_outputs(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and INTERPRETED:
        pytest.skip("Triton's interpreter takes bf16 for raw bits")
    run = RUNS[name].call
    eager = make(RUNS[name].name).to(dtype)
    if name.startswith("umt5") and not eager.decoder.block[0].layer[0].SelfAttention.is_causal:
        pytest.skip("this transformers takes that decoder for an encoder where it has no mask")
    ours = set_to(RUNS[name].name, NAME).to(dtype)

    def nearby(number: int) -> tuple[Tensor, Tensor]:
        twin = nudged(eager, number)
        return run(twin), truth(twin, run)

    assert_parity(run(ours), run(eager), truth(eager, run), nearby=nearby)


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("bloom")])
@torch.no_grad()
def test_every_attention_runs_here(name: str, calls: list[dict[str, Any]]) -> None:
    model = set_to(RUNS[name].name, NAME)
    if not model._can_set_attn_implementation():
        pytest.skip("this transformers has no attention function there")
    RUNS[name].call(model)
    layers = 6 if model.config.is_encoder_decoder else 2
    others = {"swin": 3, "bigbird_pegasus": 4}  # the encoder of the latter has no such function
    assert len(calls) == others.get(RUNS[name].name, layers)


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["t5", "umt5", "llama", "mistral"])
@torch.no_grad()
def test_generate(name: str, side: str, cache: str | None) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    options |= {"attention_mask": padding(side), "disable_compile": True}
    # a query whose window holds nothing but padding sees the mean of all keys in eager attention
    alone = name == "mistral" and side == "right"
    wanted = make(name, "sdpa" if alone else "eager").generate(tokens(), **options)
    assert torch.equal(set_to(name, NAME).generate(tokens(), **options), wanted)


@pytest.mark.parametrize("side", [None, "left"])
@torch.no_grad()
def test_a_prompt_in_parts(side: str | None, calls: list[dict[str, Any]]) -> None:
    mask = None if side is None else padding(side)

    def run(model: Any) -> Tensor:
        first = model(tokens()[:, :12], attention_mask=None if mask is None else mask[:, :12])
        after = {"attention_mask": mask, "past_key_values": first.past_key_values}
        out: Tensor = model(tokens()[:, 12:], **after).logits
        return out

    eager = make("llama")
    assert_parity(run(set_to("llama", NAME)), run(eager), truth(eager, run))
    assert all(call["bias"] is None for call in calls), "no mask has a row for each query"
    assert {call["query_start"] for call in calls} == {0, 12}


@torch.no_grad()
def test_packed_sequences() -> None:
    places = torch.cat([torch.arange(8), torch.arange(12)])[None].expand(3, -1)

    def run(model: Any) -> Tensor:
        out: Tensor = model(tokens(), position_ids=places).logits
        return out

    eager = make("llama")
    assert_parity(run(set_to("llama", NAME)), run(eager), truth(eager, run))


@pytest.mark.parametrize("name", ["t5-right", "umt5-left", "beit", "swin"])
def test_gradients(name: str) -> None:
    run = RUNS[name].call

    def gradients(model: Any) -> dict[str, Tensor]:
        run(model).square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    kind = RUNS[name].name
    ours, plain = gradients(set_to(kind, NAME)), gradients(set_to(kind, "sdpa"))
    with Float64Throughout():
        exact = gradients(make(kind).double())
    assert ours.keys() == plain.keys() == exact.keys()
    assert any("relative" in n for n in ours), "the bias is trained"
    for n, gradient in ours.items():
        assert_parity(gradient, plain[n], exact[n], factor=4.0)


@pytest.mark.parametrize("name", ["t5-right", "llama-left", "bert-right"])
@torch.no_grad()
def test_compiled(name: str) -> None:
    run, model = RUNS[name].call, set_to(RUNS[name].name, NAME)
    wanted = run(model)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(model), wanted)


@torch.no_grad()
def test_attention_weights() -> None:
    given = {"input_ids": tokens(), "attention_mask": padding("left")}
    for name in ("llama", "bert"):
        ours, eager = (make(name, n)(**given, output_attentions=True) for n in (NAME, "eager"))
        assert len(ours.attentions) == len(eager.attentions) == 2
        real = padding("left").bool()
        for got, wanted in zip(ours.attentions, eager.attentions, strict=True):
            torch.testing.assert_close(got.transpose(1, 2)[real], wanted.transpose(1, 2)[real])


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_capped_scores_run_the_eager_attention(side: str, calls: list[dict[str, Any]]) -> None:
    given = {"input_ids": tokens(), "attention_mask": padding(side)}
    ours, eager = (make("gemma2", n)(**given).logits for n in (NAME, "eager"))
    real = padding(side).bool()
    torch.testing.assert_close(ours[real], eager[real])
    assert not calls


@pytest.mark.parametrize("name", ["t5-right", "llama-left"])
def test_dropout_is_that_of_torch(name: str) -> None:
    def run(implementation: str) -> Tensor:
        model = make(RUNS[name].name, implementation).train()
        torch.manual_seed(0)
        out: Tensor = RUNS[name].call(model)
        return out

    torch.testing.assert_close(run(NAME), run("sdpa"))


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("name", ["t5-right", "layoutlmv3-right", "beit", "swin", "bloom-left"])
@torch.no_grad()
def test_beside_recipes(name: str, patch_first: bool) -> None:
    run, kind = RUNS[name].call, RUNS[name].name
    eager = make(kind)
    ours = make(kind) if patch_first else make(kind, NAME)
    assert patch_model(ours, backend="sdpa", force_all=True).counts()["patched"] > 0
    if patch_first:
        ours.set_attn_implementation(NAME)
    assert_parity(run(ours), run(eager), truth(eager, run))
    unpatch_model(ours)
    assert_parity(run(ours), run(eager), truth(eager, run))


@torch.no_grad()
def test_arguments_without_meaning_for_attention() -> None:
    model = make("bert", NAME)
    given = {"input_ids": tokens(), "attention_mask": padding("right")}
    assert torch.equal(model(**given, colour="red")[0], model(**given)[0])


@torch.no_grad()
def test_a_mask_of_four_dimensions_is_kept() -> None:
    hidden = torch.zeros(3, 1, 20, 20).masked_fill(torch.rand(3, 1, 20, 20) < 0.3, -1e9)
    hidden[..., 0] = 0.0

    def run(model: Any) -> Tensor:
        mask = hidden.to(next(model.parameters()).dtype)
        out: Tensor = model(tokens(), attention_mask=mask).logits
        return out

    eager = make("llama")
    assert_parity(run(make("llama", NAME)), run(eager), truth(eager, run))


@torch.no_grad()
def test_loaded_by_name(tmp_path: Any) -> None:
    from transformers import AutoModel

    make("beit").save_pretrained(tmp_path)
    ours, eager = (AutoModel.from_pretrained(tmp_path, attn_implementation=n) for n in (NAME, None))
    assert ours.config._attn_implementation == NAME
    pixels = image(ours)
    torch.testing.assert_close(ours(pixels)[0], eager(pixels)[0], rtol=1e-5, atol=1e-5)
