"""GPT-2 with ALiBi against a reference of a few lines, and as a transformers model."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from flashbias_convert.decompose.closed_forms import alibi_slopes
from flashbias_convert.errors import UsageError
from flashbias_convert.models.alibi_gpt2 import (
    AlibiGPT2Config,
    AlibiGPT2LMHeadModel,
    AlibiGPT2Model,
)
from flashbias_convert.models.caches import CACHE_FIELD
from tests.support import assert_parity

SIZES: dict[str, Any] = {
    "vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 8,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def make(dtype: torch.dtype = torch.float64, **options: Any) -> AlibiGPT2LMHeadModel:
    """A model whose weights are large enough that attention is no plain mean."""
    torch.manual_seed(0)
    config = AlibiGPT2Config(initializer_range=0.4, **{**SIZES, **options})
    model = AlibiGPT2LMHeadModel(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens(batch: int = 2, n: int = 20, seed: int = 1) -> Tensor:
    return torch.randint(1, 61, (batch, n), generator=torch.Generator().manual_seed(seed))


def logits_of(model: AlibiGPT2LMHeadModel, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, **kwargs).logits
    return logits


def reference(model: AlibiGPT2LMHeadModel, ids: Tensor, slopes: list[float]) -> Tensor:
    """Logits (N, vocabulary) of one row of tokens, from the weights alone; scale 1 / sqrt(D)."""
    w = {k.removeprefix("transformer."): v.detach() for k, v in model.state_dict().items()}
    n, heads = len(ids), len(slopes)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return x * w[name + ".weight"] + w[name + ".bias"]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = w["wte.weight"][ids]
    distance = torch.arange(n)[:, None] - torch.arange(n)  # how far in the past a key is
    for layer in range(len(model.transformer.h)):
        at = f"h.{layer}."
        q, k, v = linear(norm(x, at + "ln_1"), at + "attn.c_attn").chunk(3, -1)
        out = []
        parts = zip(*(y.chunk(heads, -1) for y in (q, k, v)), slopes, strict=True)
        for q_h, k_h, v_h, slope in parts:
            scores = q_h @ k_h.T / math.sqrt(q_h.shape[-1]) - slope * distance.to(x.dtype)
            out.append(scores.masked_fill(distance < 0, -math.inf).softmax(-1) @ v_h)
        x = x + linear(torch.cat(out, -1), at + "attn.c_proj")
        x = x + linear(gelu(linear(norm(x, at + "ln_2"), at + "mlp.c_fc")), at + "mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def assert_rounding_only(actual: Tensor, expected: Tensor) -> None:
    """Both float64, computed along two ways: equal to a few thousand units in the last place."""
    assert actual.dtype == expected.dtype == torch.float64 and actual.shape == expected.shape
    actual, expected = actual.detach(), expected.detach()
    error, size = float((actual - expected).abs().max()), float(expected.abs().max())
    assert error <= 4096 * torch.finfo(torch.float64).eps * size, f"off by {error:.3g}"


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["bloom", "mpt", "geometric"])
def test_it_equals_the_reference(convention: str):
    model, ids = make(alibi_slopes=convention), tokens()
    slopes = {
        "bloom": [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
        "mpt": [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
        "geometric": alibi_slopes(6, "geometric").tolist(),
    }[convention]
    expected = torch.stack([reference(model, row, slopes) for row in ids])
    assert_rounding_only(logits_of(model, ids), expected)
    without = torch.stack([reference(model, row, [0.0] * 6) for row in ids])
    assert (without - expected).abs().max() > 0.1  # the bias matters in this model


def test_single_precision_is_as_good_as_the_reference_in_it():
    model, ids = make(torch.float32), tokens()
    slopes = alibi_slopes(6).tolist()
    plain = torch.stack([reference(model, row, slopes) for row in ids])
    truth = torch.stack([reference(copy.deepcopy(model).double(), row, slopes) for row in ids])
    assert_parity(logits_of(model, ids), plain, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_no_position(dtype: torch.dtype):
    """257 is no bfloat16 and 2,049 no float16: the bias stays wide."""
    model = make(torch.float32).transformer
    far = torch.tensor([[0, 257, 2049, 65_537]])
    bias = model.to(dtype)._bias_and_mask(torch.zeros(1, 4, 24, dtype=dtype), None, None)[0]
    assert bias.dtype == torch.float32
    exact = model.build_bias(far, far[:, :1], torch.float32)
    assert torch.equal(exact[0, :, 0], alibi_slopes(6)[:, None] * far.float())


def test_slopes_and_sign_of_the_bias():
    model = make(n_head=2, alibi_bias_max=4.0).transformer
    at = torch.arange(3)[None]
    bias = model.build_bias(at, at, torch.float64)
    assert bias.shape == (1, 2, 3, 3)
    assert bias[0, 0].tolist() == [[0, 0.25, 0.5], [-0.25, 0, 0.25], [-0.5, -0.25, 0]]
    assert torch.equal(bias[0, 1], bias[0, 0] / 4)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("inverse", [True, False])
def test_scales_are_those_of_gpt2(weights: bool, inverse: bool):
    options = {"scale_attn_weights": weights, "scale_attn_by_inverse_layer_idx": inverse}
    model = make(**options)
    scales = [block.attn.scale for block in model.transformer.h]
    base = 0.5 if weights else 1.0  # heads of 4 channels
    assert scales == [base / (i + 1) if inverse else base for i in range(3)]
    # folding the scale into q gives the same model
    folded = make(scale_attn_weights=False)
    folded.load_state_dict(model.state_dict())
    for block, scale in zip(folded.transformer.h, scales, strict=True):
        block.attn.c_attn.weight.data[:, :24] *= scale
        block.attn.c_attn.bias.data[:24] *= scale
    assert_rounding_only(logits_of(folded, tokens()), logits_of(model, tokens()))


def test_no_token_sees_the_future():
    model, ids = make(), tokens()
    changed = ids.clone()
    changed[:, 12:] = tokens(seed=2)[:, 12:]
    before, after = logits_of(model, ids), logits_of(model, changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])


def test_any_length_beyond_n_positions():
    model, ids = make(n_positions=4), tokens(1, 70)
    expected = reference(model, ids[0], alibi_slopes(6).tolist())
    assert_rounding_only(logits_of(model, ids)[0], expected)


# -- padding -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_computes_what_it_would_alone(side: str):
    model, rows = make(), [tokens(1, n, seed=n)[0] for n in (7, 20, 13)]
    ids, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
    kept = [slice(20 - len(r), 20) if side == "left" else slice(0, len(r)) for r in rows]
    for i, row in enumerate(rows):
        ids[i, kept[i]], mask[i, kept[i]] = row, 1
    padded = logits_of(model, ids, attention_mask=mask)
    assert padded.isfinite().all()
    for i, row in enumerate(rows):
        assert_rounding_only(padded[i, kept[i]], logits_of(model, row[None])[0])


def test_a_token_that_the_mask_drops_takes_no_position():
    model, ids = make(), tokens(1, 12)
    mask = torch.ones(1, 12)
    mask[0, 5] = 0
    kept = [i for i in range(12) if i != 5]
    found = logits_of(model, ids, attention_mask=mask)[0, kept]
    assert_rounding_only(found, logits_of(model, ids[:, kept])[0])


def test_the_mask_is_made_of_causality_and_padding():
    model = make(torch.float32).transformer
    low = torch.finfo(torch.float32).min
    key_mask = torch.tensor([[False, True, True, True, False]])
    mask = model.build_mask(key_mask, 2, 2, 5, torch.float32)
    assert mask.tolist() == [[[[low, 0, 0, low, low], [low, 0, 0, 0, low]]]]
    assert model.build_mask(None, 0, 3, 3, torch.float64).shape == (1, 1, 3, 3)


# -- caches and generation -----------------------------------------------------------------


def in_pieces(model: AlibiGPT2LMHeadModel, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Logits of all tokens, fed 6, then 1, then the rest at a time."""
    parts = []
    for piece in (slice(0, 6), slice(6, 7), slice(7, ids.shape[1])):
        kwargs = {CACHE_FIELD: cache, "attention_mask": mask[:, : piece.stop]}
        with torch.no_grad():
            output = model(ids[:, piece], use_cache=True, **kwargs)
        cache = output[CACHE_FIELD]
        parts.append(output.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_pieces_with_a_cache_give_the_logits_of_the_whole(kind: type):
    model, ids, mask = make(), tokens(), torch.ones(2, 20, dtype=torch.long)
    mask[1, :4] = 0
    cache = kind(config=model.config, **({"max_cache_len": 31} if kind is StaticCache else {}))
    whole = logits_of(model, ids, attention_mask=mask)
    found = in_pieces(model, ids, mask, cache)
    assert_rounding_only(found[0], whole[0])
    assert_rounding_only(found[1, 4:], whole[1, 4:])


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_a_cache_equals_generation_without(implementation: str, padded: bool):
    model, ids = make(), tokens(3, 9)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = mask[2, :8] = 0
        ids = ids * mask
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    plain = model.generate(ids, use_cache=False, **options)
    cached = model.generate(ids, cache_implementation=implementation, **options)
    assert torch.equal(plain.sequences, cached.sequences)
    assert len({tuple(row) for row in plain.sequences[:, 9:].tolist()}) == 3
    for a, b in zip(plain.logits, cached.logits, strict=True):  # generate hands out float32
        assert (a - b).abs().max() <= 4 * torch.finfo(torch.float32).eps * a.abs().max()


def test_generation_with_padding_equals_generation_alone():
    model, ids = make(), tokens(1, 6)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    alone = model.generate(ids, **options)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    found = model.generate(padded, attention_mask=(padded != 0).long(), **options)
    assert torch.equal(found[:, 5:], alone)


def test_beams_and_embeddings_generate():
    model, ids = make(), tokens(2, 5)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    embedded = model.get_input_embeddings()(ids)
    by_ids = model.generate(ids, **options)[:, 5:]
    assert torch.equal(model.generate(inputs_embeds=embedded, **options), by_ids)
    beams = model.generate(ids, num_beams=3, **options)
    assert torch.equal(beams, model.generate(ids, num_beams=3, use_cache=False, **options))


@pytest.mark.parametrize("static", [False, True])
def test_a_forward_compiles_in_one_piece(static: bool):
    model, ids = make(), tokens()
    expected = logits_of(model, ids)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    kwargs: dict[str, Any] = {"use_cache": False}
    if static:
        cache = StaticCache(config=model.config, max_cache_len=24)
        model(ids[:, :3], attention_mask=torch.ones(2, 3), **{CACHE_FIELD: cache})
        kwargs = {CACHE_FIELD: cache, "attention_mask": torch.ones(2, 20)}
        ids, expected = ids[:, 3:], expected[:, 3:]
    assert_rounding_only(logits_of(compiled, ids, **kwargs), expected)


# -- training ------------------------------------------------------------------------------


def test_the_loss_predicts_the_next_token():
    model, ids = make(), tokens()
    labels = ids.clone()
    labels[0, 10:] = -100
    log_p = logits_of(model, ids).log_softmax(-1)
    picked = log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    kept = labels[:, 1:] != -100
    loss = model(ids, labels=labels).loss.item()
    assert loss == pytest.approx(float(-picked[kept].mean()), rel=1e-5)  # a float32 loss
    summed = model(ids, labels=labels, num_items_in_batch=7).loss.item()
    assert summed == pytest.approx(float(-picked[kept].sum()) / 7, rel=1e-5)


def gradients(model: AlibiGPT2LMHeadModel, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(5)  # dropout
    model(ids, labels=ids).loss.backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def test_gradients_reach_every_weight_and_are_those_of_the_loss():
    model, ids = make(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train(), tokens()
    found = gradients(model, ids)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, gradient in found.items():
        assert gradient.abs().max() > 0, name
    weight = model.transformer.h[1].attn.c_attn.weight
    step, at = 1e-4, (3, 5)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[at] += sign * step
            # in float64: the loss of the model itself is float32
            log_p = model(ids).logits[:, :-1].log_softmax(-1)
            losses.append(float(-log_p.gather(-1, ids[:, 1:, None]).mean()))
            weight[at] -= sign * step
    slope = (losses[0] - losses[1]) / (2 * step)
    assert slope == pytest.approx(float(found["transformer.h.1.attn.c_attn.weight"][at]), rel=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool):
    model, ids = make(attn_pdrop=0.2).train(), tokens()
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model, ids)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_rounding_only(found[name], expected[name])
    with pytest.raises(UsageError, match="cannot fill a cache"):
        model(ids, **{CACHE_FIELD: DynamicCache(config=model.config)})


@pytest.mark.parametrize("which", ["attn_pdrop", "resid_pdrop", "embd_pdrop"])
def test_dropout_acts_in_training_only(which: str):
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model, ids = make(**{**off, which: 0.5}), tokens()
    plain = logits_of(model, ids)
    assert torch.equal(plain, logits_of(make(**off), ids))
    model.train()
    assert not torch.allclose(logits_of(model, ids), plain)


def test_projections_that_end_a_branch_start_small():
    torch.manual_seed(0)
    block = AlibiGPT2Model(AlibiGPT2Config(n_embd=96, n_layer=8, n_head=6, vocab_size=9)).h[0]
    for part in (block.attn.c_proj, block.mlp.c_proj):
        assert part.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)


# -- files ---------------------------------------------------------------------------------


def test_saved_and_loaded_it_is_the_same_model(tmp_path: Path):
    model, ids = make(torch.float32, alibi_slopes="geometric", alibi_bias_max=6.0), tokens()
    model.save_pretrained(tmp_path)
    for cls in (AlibiGPT2LMHeadModel, AutoModelForCausalLM):
        loaded = cls.from_pretrained(tmp_path).eval()
        assert type(loaded) is AlibiGPT2LMHeadModel
        assert (loaded.config.alibi_slopes, loaded.config.alibi_bias_max) == ("geometric", 6.0)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    body = AutoModel.from_pretrained(tmp_path).eval()
    assert type(body) is AlibiGPT2Model
    with torch.no_grad():
        hidden = body(ids).last_hidden_state
    assert torch.equal(hidden @ body.wte.weight.T, logits_of(model, ids))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is AlibiGPT2Config
    assert config.architectures == ["AlibiGPT2LMHeadModel"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slopes_are_rounded_by_no_cast_and_no_load(dtype: torch.dtype, tmp_path: Path):
    model = make(torch.float32, alibi_slopes="geometric")  # slopes that are no powers of two
    model.save_pretrained(tmp_path)
    loaded = AlibiGPT2LMHeadModel.from_pretrained(tmp_path, dtype=dtype)
    moved = AlibiGPT2LMHeadModel(model.config).to("meta").to_empty(device="cpu")
    for other in (loaded, model.to(dtype), copy.deepcopy(model), moved):
        assert other.transformer.slopes.dtype == torch.float32
        assert torch.equal(other.transformer.slopes, alibi_slopes(6, "geometric"))
        assert not any("slopes" in key for key in other.state_dict())
    assert loaded.transformer.wte.weight.dtype == dtype


@pytest.mark.parametrize("whole", [True, False])
def test_it_takes_the_weights_of_a_gpt2(whole: bool, tmp_path: Path):
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).eval()
    (gpt2 if whole else gpt2.transformer).save_pretrained(tmp_path)
    model, info = AlibiGPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    state, theirs = model.state_dict(), gpt2.state_dict()
    assert state.keys() == theirs.keys() - {"transformer.wpe.weight"}
    assert all(torch.equal(state[k], theirs[k]) for k in state)
    assert model.config.model_type == "alibi_gpt2"
    # without positions and biases both are one model
    torch.nn.init.zeros_(gpt2.transformer.wpe.weight)
    model.transformer.build_bias = lambda *_: torch.zeros(1, 1, 1, 1)
    ids = tokens(2, 8)
    assert torch.allclose(logits_of(model, ids), gpt2(ids).logits, atol=1e-5)


def test_masks_that_old_checkpoints_hold_are_ignored(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    make(torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, info = AlibiGPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())


# -- outputs and refusals ------------------------------------------------------------------


def test_logits_to_keep_and_tuples():
    model, ids = make(), tokens()
    whole = logits_of(model, ids)
    assert_rounding_only(logits_of(model, ids, logits_to_keep=3), whole[:, -3:])
    kept = torch.tensor([0, 7])
    assert_rounding_only(logits_of(model, ids, logits_to_keep=kept), whole[:, kept])
    with torch.no_grad():
        logits, cache = model(ids, return_dict=False)
    assert torch.equal(logits, whole)
    assert cache.get_seq_length() == 20


def test_hidden_states_lead_to_the_result():
    model, ids = make(), tokens()
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert torch.equal(states[0], model.transformer.wte(ids))
    assert_rounding_only(model.lm_head(states[-1]), logits_of(model, ids))
    assert model(ids).hidden_states is None


def test_a_cache_comes_back_when_it_was_asked_for():
    model, ids = make(), tokens()
    assert model(ids)[CACHE_FIELD].get_seq_length() == 20
    assert model(ids, use_cache=False).get(CACHE_FIELD) is None
    assert model.train()(ids).get(CACHE_FIELD) is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position_ids": torch.arange(20)[None]}, "no position_ids: positions follow"),
        ({"token_type_ids": torch.zeros(2, 20)}, "no token_type_ids"),
        ({"encoder_hidden_states": torch.zeros(2, 3, 24)}, "no cross-attention"),
        ({"output_attentions": True}, "not returned"),
        ({"attention_mask": torch.ones(2, 19)}, r"shape \(B, 20\)"),
        ({"attention_mask": torch.ones(2, 1, 20, 20)}, r"shape \(B, 20\)"),
        ({"inputs_embeds": torch.zeros(2, 20, 24)}, "either input_ids or inputs_embeds"),
        ({"cache": DynamicCache(), "past_key_values": DynamicCache()}, "both came"),
    ],
)
def test_what_it_cannot_do_is_refused(kwargs: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        make()(tokens(), **kwargs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": "press", "n_head": 8}, "bloom, mpt, geometric"),
        ({"alibi_bias_max": 0.0}, "must be positive"),
        ({"add_cross_attention": True}, "no cross-attention"),
        ({"n_head": 7}, "24 channels cannot be shared by 7 heads"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        AlibiGPT2Config(**{**SIZES, **options})
