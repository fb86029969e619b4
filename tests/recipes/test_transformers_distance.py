"""MPNet, T5 and its family, patched, against the originals, with random weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.models.caches import CACHE_FIELD
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.swap import patched_owners
from flashbias_convert.views import site_views
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised
from tests.support import assert_parity

transformers = pytest.importorskip("transformers")

N, VOCABULARY = 24, 97
T5_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0, "dropout_rate": 0.1,
}  # fmt: skip
T5_FAMILY = {
    "t5": ("T5Config", "T5ForConditionalGeneration"),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration"),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration"),
}


def tokens(batch: int = 3, n: int = N, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(seed))


def padding(batch: int = 3, n: int = N, side: str = "right") -> Tensor:
    """Padding of 7 tokens, of 3, and none."""
    mask = torch.ones(batch, n, dtype=torch.long)
    for row, count in ((0, 7), (1, 3)):
        mask[row, -count:] = 0
    return mask if side == "right" else mask.flip(-1)


def mpnet(**changes: Any) -> Any:
    config = transformers.MPNetConfig(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 32, "max_position_embeddings": 66,
        } | changes
    )  # fmt: skip
    return randomised(transformers.MPNetModel(config), relative_attention_bias=2.0)


def t5(name: str, **changes: Any) -> Any:
    config_name, model_name = T5_FAMILY[name]
    config = getattr(transformers, config_name)(**T5_SIZES | changes)
    model = getattr(transformers, model_name)(config)
    return randomised(model, relative_attention_bias=3.0, shared=1.0, lm_head=0.3)


def is_causal(name: str) -> bool:
    """Whether a decoder is told so; that of UMT5 is since transformers 5.18."""
    return bool(t5(name).decoder.block[0].layer[0].SelfAttention.is_causal)


def require_causal(name: str) -> None:
    if not is_causal(name):
        pytest.skip(
            f"the decoder of {name} is not causal with sdpa in this version of transformers"
        )


def t5_case(name: str, side: str | None) -> Case:
    def run(model: Any) -> Tensor:
        decoder_mask = None if side is None else padding(n=11, side=side)
        mask = None if side is None else padding(side=side)
        found = model(
            input_ids=tokens(), attention_mask=mask, decoder_input_ids=tokens(n=11, seed=2),
            decoder_attention_mask=decoder_mask,
        )  # fmt: skip
        parts = []
        for states, seen in (
            (found.encoder_last_hidden_state, mask),
            (found.logits, decoder_mask),
        ):
            real = states if seen is None else states[seen.bool()]
            parts.append((real / real.detach().abs().max()).flatten())
        return torch.cat(parts)

    counts = {"patched": 4} if is_causal(name) else {"patched": 2, "unsupported": 2}
    counts["left alone"] = 2
    return Case(lambda: t5(name), run, ("relative_attention_bias.weight",), counts)


def mpnet_case(side: str | None) -> Case:
    def run(model: Any) -> Tensor:
        mask = None if side is None else padding(side=side)
        states: Tensor = model(tokens(), attention_mask=mask).last_hidden_state
        return states if mask is None else states[mask.bool()]

    return Case(mpnet, run, ("relative_attention_bias.weight",), {"patched": 2})


CASES = {
    f"{name} {side}": mpnet_case(side) if name == "mpnet" else t5_case(name, side)
    for name in ("mpnet", *T5_FAMILY)
    for side in (None, "right", "left")
}
PADDED = [name for name in CASES if name.endswith("right")]


@pytest.fixture(params=PADDED)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[str(request.param)]


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


def test_hidden_states_are_returned(case: Case) -> None:
    """transformers finds what it may record by the printed name of a class."""
    model = case.make()
    decoder = {} if case is CASES["mpnet right"] else {"decoder_input_ids": tokens(n=5)}
    found = []
    for change in (lambda m: None, case.patched):
        change(model)
        with torch.no_grad():
            out = model(tokens(), output_hidden_states=True, **decoder)
        found.append([x for name in out if "hidden_states" in name for x in out[name]])
    assert len(found[0]) == len(found[1]) >= 3
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_comes_and_goes(case: Case) -> None:
    parity.check_comes_and_goes(case)


def test_training_is_the_original(case: Case) -> None:
    # the encoder of T5 and its decoder are two owners
    parity.check_training(case, together=case is CASES["mpnet right"])


def test_other_weights_bring_their_bias(case: Case) -> None:
    parity.check_follows_weights(case)


@pytest.mark.parametrize("name", ["mpnet right", "t5 right", "mt5 right", "umt5 right"])
def test_a_folder_converts_and_loads(name: str, tmp_path: Path) -> None:
    parity.check_folder(CASES[name], tmp_path)


@pytest.mark.parametrize("name", ["mpnet right", "t5 right", "umt5 right"])
def test_attention_weights_come_from_the_original(name: str) -> None:
    def run(model: Any) -> Any:
        kwargs = {} if name.startswith("mpnet") else {"decoder_input_ids": tokens(n=11, seed=2)}
        model.set_attn_implementation("eager")
        out = model(tokens(), attention_mask=padding(), output_attentions=True, **kwargs)
        if name.startswith("mpnet"):
            return out.last_hidden_state, out.attentions
        return out.logits, out.encoder_attentions, out.decoder_attentions, out.cross_attentions

    parity.check_attention_weights(CASES[name], run)


@pytest.mark.parametrize("name", ["mpnet", "t5", "umt5"])
def test_a_mask_of_your_own_is_used_as_it_is(name: str) -> None:
    model = mpnet() if name == "mpnet" else t5(name).encoder
    hidden = torch.rand(3, 1, N, N, generator=torch.Generator().manual_seed(2)) < 0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        plain = model(tokens(), attention_mask=mask).last_hidden_state
        patch_model(model, backend="sdpa")
        assert torch.equal(model(tokens(), attention_mask=mask).last_hidden_state, plain)


@pytest.mark.parametrize("shape", [(3, N - 1), (3, N + 1), (2, N)])
@pytest.mark.parametrize("name", ["mpnet", "t5"])
def test_a_mask_of_another_size_is_refused(name: str, shape: tuple[int, int]) -> None:
    model = mpnet() if name == "mpnet" else t5(name).encoder
    patch_model(model, backend="sdpa")
    with pytest.raises(ValueError, match="attention mask"), torch.no_grad():
        model(tokens(), attention_mask=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("n", [1, 2, 64])
def test_lengths_of_mpnet(n: int) -> None:
    model, ids = mpnet(), tokens(2, n)
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        truth = copy.deepcopy(model).double()(ids).last_hidden_state
        patch_model(model, backend="sdpa", tokens=8)
        assert_parity(model(ids).last_hidden_state, plain, truth)


# -- decoding ------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "static", "none at all"])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_generate(name: str, cache: str | None) -> None:
    if cache == "none at all":
        require_causal(name)  # else the original says something else without a cache
    model = t5(name)
    settings: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    settings |= {"attention_mask": padding(side="left")}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(tokens(), **settings)
    patch_model(model, backend="sdpa")
    calls = []
    patched_owners(model)[0].register_forward_hook(lambda *_: calls.append(1))
    if cache == "none at all":
        settings["use_cache"] = False
    elif cache is not None:
        settings["cache_implementation"] = cache
    out = model.generate(tokens(), **settings)
    assert calls and torch.equal(out.sequences, plain.sequences)
    for theirs, ours in zip(plain.logits, out.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["t5", "umt5"])
@pytest.mark.parametrize("padded", [False, True])
def test_pieces_give_what_the_whole_gives(name: str, padded: bool) -> None:
    """A decoder's prompt in three pieces through a cache: queries start amid the keys."""
    if not padded:
        require_causal(name)
    model = t5(name)
    ids, mask = tokens(n=20, seed=2), padding(n=20, side="left") if padded else None
    encoded = {"encoder_hidden_states": torch.randn(3, 5, 32)}
    with torch.no_grad():
        whole = model.decoder(ids, attention_mask=mask, **encoded).last_hidden_state
        patch_model(model, backend="sdpa")
        cache = transformers.EncoderDecoderCache(
            transformers.DynamicCache(), transformers.DynamicCache()
        )
        parts = []
        for start, stop in ((0, 9), (9, 10), (10, 20)):
            out = model.decoder(
                ids[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                use_cache=True,
                **{CACHE_FIELD: cache},
                **encoded,
            )
            parts.append(out.last_hidden_state)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    whole, parts_together = whole[real], torch.cat(parts, 1)[real]
    assert (parts_together - whole).abs().max() < 1e-5


# -- sites and owners ----------------------------------------------------------------------


def test_a_decoder_that_attends_to_what_comes_is_unsupported() -> None:
    model = t5("umt5")
    for block in model.decoder.block:  # as those of transformers 5.15 to 5.17
        block.layer[0].SelfAttention.is_causal = False
    plan = inspect_model(model)
    assert plan.counts() == {"patched": 2, "unsupported": 2, "left alone": 2}
    (reason,) = {site.reason for site in plan.with_status("unsupported")}
    assert "does not tell it that it is causal" in reason
    assert all("EncDecAttention" in site.name for site in plan.with_status("left alone"))


def test_cross_attention_is_left_alone() -> None:
    plan = inspect_model(t5("t5"))
    alone = plan.with_status("left alone")
    assert [site.name for site in alone] == [
        f"decoder.block.{i}.layer.1.EncDecAttention" for i in (0, 1)
    ]
    assert all("cross-attention" in site.reason for site in alone)
    assert all(site.builders() == ("distance_table",) for site in plan.patched)


def test_layers_without_a_table_of_their_own_get_the_bias_of_the_first() -> None:
    """Of three layers one has a table; all are converted, and no site keeps a copy of it."""
    model = t5("t5", num_layers=3)
    attentions = [block.layer[0].SelfAttention for block in model.encoder.block]
    assert [a.has_relative_attention_bias for a in attentions] == [True, False, False]
    call = {"input_ids": tokens(), "decoder_input_ids": tokens(n=11, seed=2)}
    with torch.no_grad():
        plain, truth = (m(**call).logits for m in (model, copy.deepcopy(model).double()))
        plan = patch_model(model, backend="sdpa", force_all=True)
        assert plan.counts() == {"patched": 6, "left alone": 3}
        assert_parity(model(**call).logits, plain, truth)
    tables = [key for key in model.state_dict() if "relative_attention_bias" in key]
    assert len(tables) == 2  # of the encoder and of the decoder
    kept = [x for key, x in model.state_dict().items() if ".score_bias." in key]
    assert kept and not any(x.is_floating_point() and x.numel() for x in kept)


def test_a_viewer_is_told_why_there_is_nothing_to_draw() -> None:
    notes = {view.note for view in site_views(t5("t5"), inspect_model(t5("t5")))}
    assert notes == {"its bias is made in each call", "cross-attention: it adds no bias"}
    (note,) = {view.note for view in site_views(mpnet(), inspect_model(mpnet()))}
    assert note == "its bias is made in each call"


def test_one_layer_left_alone_means_its_stack() -> None:
    name = "encoder.block.1.layer.0.SelfAttention"
    model = t5("t5")
    plan = patch_model(model, exclude=[name], backend="sdpa")
    status = {site.name: site.status for site in plan.sites}
    assert status["encoder.block.0.layer.0.SelfAttention"] == "left alone"
    assert status["decoder.block.0.layer.0.SelfAttention"] == "patched"
    with torch.no_grad():
        plain = t5("t5")(input_ids=tokens(), decoder_input_ids=tokens(n=5)).logits
        out = model(input_ids=tokens(), decoder_input_ids=tokens(n=5)).logits
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


def test_layers_without_their_stack_are_unsupported() -> None:
    for module in (mpnet().encoder.layer[0], t5("t5").encoder.block[0]):
        (site,) = inspect_model(module).sites
        assert site.status == "unsupported" and "not part of this model" in site.reason


def pruned(name: str) -> tuple[Any, str]:
    """A model whose second layer has lost one of four heads, but not the bias; and that layer."""
    model = mpnet() if name == "mpnet" else t5(name).encoder
    site = "encoder.layer.1.attention.attn" if name == "mpnet" else "block.1.layer.0.SelfAttention"
    attention = model.get_submodule(site)
    for part in "qkv":
        setattr(attention, part, torch.nn.Linear(32, 24, bias=name == "mpnet"))
    attention.o = torch.nn.Linear(24, 32, bias=name == "mpnet")
    if name == "mpnet":
        attention.num_attention_heads, attention.all_head_size = 3, 24
    else:
        attention.n_heads, attention.inner_dim = 3, 24
    return model.eval(), site


@pytest.mark.parametrize("name", ["mpnet", "t5", "umt5"])
def test_a_layer_with_fewer_heads_than_the_bias_is_unsupported(name: str) -> None:
    """As after pruning; and then nothing that shares the bias is patched."""
    model, site = pruned(name)
    sites = {s.name: s for s in inspect_model(model).sites}
    assert sites[site].status == "unsupported"
    assert "3 heads" in sites[site].reason and "has 4" in sites[site].reason
    assert not any(s.status == "patched" for s in sites.values())
    with pytest.raises(RuntimeError), torch.no_grad():  # the original has no use for it either
        model(tokens())


def test_layers_that_all_lost_a_head_with_their_bias_are_patched() -> None:
    model, site = pruned("umt5")
    attention = model.get_submodule(site)
    table = attention.relative_attention_bias.weight[:, :3]
    attention.relative_attention_bias = torch.nn.Embedding(*table.shape, _weight=table.detach())
    with torch.no_grad():
        plain, truth = (
            m(tokens()).last_hidden_state for m in (model, copy.deepcopy(model).double())
        )
        plan = patch_model(model, backend="sdpa")
        assert {s.name: s.heads for s in plan.patched}[site] == 3
        assert_parity(model(tokens()).last_hidden_state, plain, truth)


@pytest.mark.parametrize("name", ["mpnet", "t5", "umt5"])
def test_nothing_of_quadratic_size_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the kernel: the backends that run on a CPU do make scores."""
    n = 600
    model = mpnet(max_position_embeddings=n + 2) if name == "mpnet" else t5(name)
    patch_model(model, backend="sdpa")
    monkeypatch.setattr(ScoreBiasModule, "forward", lambda self, q, k, v, **kwargs: q.clone())
    mask = padding(2, n)
    stacks = [model] if name == "mpnet" else [model.encoder, model.decoder]
    if name != "mpnet" and not is_causal(name):
        stacks = stacks[:1]  # the decoder is not converted
    for part in stacks:
        with parity.NoSquares(n), torch.no_grad():
            part(tokens(2, n), attention_mask=mask)


# -- training ------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_t5_trains_with_gradient_checkpoints_as_its_original_does(reentrant: bool) -> None:
    """The bias of layer 0 is handed on to layers that are computed again."""
    model = t5("t5", dropout_rate=0.0)
    grads = []
    for change in (lambda m: m, lambda m: patch_model(m, force_all=True)):
        change(model)
        model.train().zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(input_ids=tokens(), labels=tokens(n=11, seed=2), use_cache=False).loss.backward()
        assert model.is_gradient_checkpointing
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.gradient_checkpointing_disable()
        model.eval()
    assert grads[0].keys() == grads[1].keys()
    assert any("relative_attention_bias" in name for name in grads[0])
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
