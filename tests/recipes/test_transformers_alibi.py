"""ALiBi GPT-2, BLOOM, MPT and Falcon, patched, against the originals, with random weights."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashbias_convert import inspect_model, load_model, patch_model, patched, unpatch_model
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.models.caches import CACHE_FIELD
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.swap import patched_modules, patched_owners
from tests.adapters import add_adapters, switch
from tests.support import assert_parity

transformers = pytest.importorskip("transformers")

HEADS = 6
SIZES: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make(name: str, **changes: Any) -> Any:
    """A model of two layers and six heads (no power of two) in eval mode, whose bias matters."""
    if name == "bloom":
        config = transformers.BloomConfig(
            hidden_size=48, n_layer=2, n_head=HEADS, **SIZES | changes
        )
        make_model = transformers.BloomForCausalLM
    elif name == "mpt":
        sizes = {"d_model": 48, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 64}
        config = transformers.MptConfig(**SIZES | sizes | changes)
        make_model = transformers.MptForCausalLM
    elif name == "gpt2":
        from flashbias_convert.models.alibi_gpt2 import AlibiGPT2Config, AlibiGPT2LMHeadModel

        config = AlibiGPT2Config(
            **SIZES
            | {
                "n_embd": 48,
                "n_layer": 2,
                "n_head": HEADS,
                "attn_pdrop": 0.0,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
            }
            | changes
        )
        make_model = AlibiGPT2LMHeadModel
    else:
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
        style = {"alibi": True, "multi_query": False, "new_decoder_architecture": False}
        config = transformers.FalconConfig(**SIZES | sizes | style | changes)
        make_model = transformers.FalconForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_model(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.15)
    return model


OWNERS = {"bloom": 1, "mpt": 2, "falcon": 2, "gpt2": 1}
NAMES = ("bloom", "mpt", "falcon", "gpt2")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tokens(batch: int = 3, n: int = 20) -> Tensor:
    return torch.randint(3, 97, (batch, n), generator=torch.Generator().manual_seed(1))


def padding(batch: int = 3, n: int = 20) -> Tensor:
    """Left padding of 7 tokens, of 3, and none."""
    mask = torch.ones(batch, n, dtype=torch.long)
    mask[0, :7] = 0
    mask[1, :3] = 0
    return mask


def patch(model: nn.Module, **options: Any) -> nn.Module:
    plan = patch_model(model, **{"backend": "sdpa", **options})
    assert plan.counts() == {"patched": 2}
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    out: Tensor = model(ids, **kwargs).logits
    return out


def true_logits(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the original computes in float64, with a bias that is not rounded to float32.

    Row by row and without the padding: in float64 padding makes the originals give NaN. Zeros
    stand where tokens are padding.
    """
    wide = copy.deepcopy(model).double()
    if hasattr(wide.get_decoder(), "build_alibi_tensor"):  # the slopes of BLOOM are float32
        wide.get_decoder().build_alibi_tensor = exact_bloom(wide.get_decoder())
    real = torch.ones_like(ids) if mask is None else mask
    out = torch.zeros(*ids.shape, 97, dtype=torch.float64)
    for i, kept in enumerate(real.bool()):
        out[i, kept] = logits(wide, ids[i : i + 1, kept], attention_mask=real[i : i + 1, kept])[0]
    return out


def exact_bloom(decoder: Any) -> Callable[..., Tensor]:
    slopes = decoder.build_alibi_tensor(torch.ones(1, 2), HEADS, torch.float32)[:, 0, 1].double()

    def build(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        places = (mask.cumsum(-1) - 1) * mask
        return (slopes[:, None] * places[:, None, :]).flatten(0, 1)[:, None, :]

    return build


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_logits(name: str, dtype: torch.dtype, padded: bool, backend: str) -> None:
    model, ids = make(name).to(dtype), tokens()
    mask = padding() if padded else torch.ones_like(ids)
    real = mask.bool()
    truth = true_logits(model, ids, mask)
    plain = logits(model, ids, attention_mask=mask)
    patch(model, backend=backend)
    assert_parity(logits(model, ids, attention_mask=mask)[real], plain[real], truth[real])
    if not padded:
        assert_parity(logits(model, ids), plain, truth)


def test_padding_on_the_right_and_in_between(name: str) -> None:
    model, ids, mask = make(name), tokens(), torch.ones(3, 20, dtype=torch.long)
    mask[0, 12:], mask[1, 5:8], mask[1, 0] = 0, 0, 0
    real = mask.bool()
    truth, plain = true_logits(model, ids, mask), logits(model, ids, attention_mask=mask)
    found = logits(patch(model), ids, attention_mask=mask)
    torch.testing.assert_close(found[real], plain[real], rtol=1e-4, atol=1e-5)
    if name in ("mpt", "falcon"):  # they count the gap, which the truth leaves out
        real[1] = False
    assert_parity(found[real], plain[real], truth[real])


def test_a_row_of_padding_alone_harms_nobody(name: str) -> None:
    model, ids, mask = patch(make(name)), tokens(), padding()
    alone = logits(model, ids[1:], attention_mask=mask[1:])
    mask[0] = 0
    together = logits(model, ids, attention_mask=mask)
    assert together.isfinite().all()
    real = mask[1:].bool()
    torch.testing.assert_close(together[1:][real], alone[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 65, 700])
def test_lengths(name: str, n: int) -> None:
    """Beyond MPT's table, too: there the original stops."""
    model, ids = make(name, **({"max_seq_len": 700} if name == "mpt" else {})), tokens(1, n)
    truth, plain = true_logits(model, ids), logits(model, ids)
    if name == "mpt":
        model = make(name, max_seq_len=8)
        if n > 8:
            with pytest.raises(RuntimeError):
                logits(model, ids)
    patch(model)
    assert_parity(logits(model, ids), plain, truth)


@pytest.mark.parametrize(
    "changes",
    [
        {"multi_query": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 6},
    ],
)
def test_key_heads_of_falcon(changes: dict[str, Any]) -> None:
    model, ids, mask = make("falcon", **changes), tokens(), padding()
    truth = true_logits(model, ids, mask)
    plain = logits(model, ids, attention_mask=mask)
    patch(model)
    real = mask.bool()
    assert_parity(logits(model, ids, attention_mask=mask)[real], plain[real], truth[real])


def test_falcon_adds_its_bias_once() -> None:
    """Its eager attention adds it twice, to the mask and to the scores."""
    once, twice, ids = make("falcon"), make("falcon"), tokens()
    twice.config._attn_implementation = "eager"
    plain = logits(once, ids)
    assert (logits(twice, ids) - plain).abs().max() > 1e-3
    plan = patch_model(twice, backend="sdpa")
    assert "once" in plan.sites[0].warnings[0]
    assert_parity(logits(twice, ids), plain, true_logits(once, ids))


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_attention_in_both_directions_is_unsupported(name: str) -> None:
    """A bias of the key alone stands for a distance under a causal mask only."""
    model = make(name)
    model.config.is_causal = False
    site = inspect_model(model).sites[0]
    assert site.status == "unsupported" and "both directions" in site.reason


def test_clipped_projections_and_softmax_scale_of_mpt() -> None:
    model, ids = make("mpt", attn_config={"clip_qkv": 0.3, "softmax_scale": 0.5}), tokens()
    truth, plain = true_logits(model, ids), logits(model, ids)
    assert (plain - logits(make("mpt"), ids)).abs().max() > 0.1
    patch(model)
    assert_parity(logits(model, ids), plain, truth)


def test_residual_after_the_norm_of_bloom() -> None:
    model, ids = make("bloom", apply_residual_connection_post_layernorm=True), tokens()
    truth, plain = true_logits(model, ids), logits(model, ids)
    patch(model)
    assert_parity(logits(model, ids), plain, truth)


# -- caches --------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_generate(name: str, cache: str | None, padded: bool, dtype: torch.dtype) -> None:
    model, ids = make(name).to(dtype), tokens()
    mask = padding() if padded else torch.ones_like(ids)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(ids, **settings)
    # the original of Falcon cannot use a static cache at all
    if cache is not None:
        settings["cache_implementation"] = cache
    out = patch(model).generate(ids, **settings)
    same = (out.sequences == plain.sequences).all(1)
    for row in [r for r in range(3) if not same[r]]:
        pairs = [(p[row], o[row]) for p, o in zip(plain.logits, out.logits, strict=True)]
        theirs, _ = next(pair for pair in pairs if pair[0].argmax() != pair[1].argmax())
        # only a tie within the rounding may go either way
        top = theirs.float().topk(2).values
        assert top[0] - top[1] <= 8 * torch.finfo(dtype).eps * theirs.abs().max()
    assert dtype != torch.float32 or same.all()


def test_pieces_give_what_the_whole_gives(name: str) -> None:
    """A prompt in three pieces through a cache: queries start in the middle of the keys."""
    model, ids, mask = patch(make(name)), tokens(), padding()
    whole = logits(model, ids, attention_mask=mask)
    cache, parts = transformers.DynamicCache(), []
    for start, stop in ((0, 9), (9, 10), (10, 20)):
        with torch.no_grad():
            out = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                use_cache=True,
                **{CACHE_FIELD: cache},
            )
        parts.append(out.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-4, atol=1e-5)


def test_a_mask_that_forgets_the_cached_tokens_is_refused(name: str) -> None:
    model, ids = patch(make(name)), tokens()
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE_FIELD: cache})
        for hidden in (0, 1):
            short = torch.ones(3, 1, dtype=torch.long)
            short[0] = hidden
            with pytest.raises(ValueError, match=r"cached tokens|attention_mask|tokens"):
                model(ids[:, :1], attention_mask=short, use_cache=True, **{CACHE_FIELD: cache})


@pytest.mark.parametrize("shape", [(3, 5), (3, 25), (1, 20)])
def test_a_mask_of_another_size_is_refused(name: str, shape: tuple[int, int]) -> None:
    if name == "gpt2" and shape == (1, 20):
        pytest.skip("the original takes one row for all")
    model, ids = patch(make(name)), tokens()
    with pytest.raises((ValueError, RuntimeError)):
        logits(model, ids, attention_mask=torch.ones(shape, dtype=torch.long))


def test_threads_that_share_a_model(name: str) -> None:
    """One calls the original, for a block of it trains, while another runs the fused path."""
    model, ids, mask = patch(make(name)), tokens(), padding()
    expected = logits(model, ids, attention_mask=mask)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: logits(model, ids, attention_mask=mask), range(40)))
    assert all(torch.equal(x, expected) for x in found)
    owner = patched_owners(model)[-1]
    with owner.lean(), ThreadPoolExecutor(1) as pool:
        assert owner.is_lean and not pool.submit(lambda: owner.is_lean).result()


# -- what the fused path cannot do runs the original ---------------------------------------


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_attention_weights_come_from_the_original(name: str) -> None:
    model, ids = make(name), tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(ids, output_attentions=True)
        out = patch(model)(ids, output_attentions=True)
    assert torch.equal(out.logits, plain.logits)
    assert all(torch.equal(a, b) for a, b in zip(out.attentions, plain.attentions, strict=True))


def test_a_mask_of_your_own_is_used_as_it_is() -> None:
    model, ids = make("mpt"), tokens()
    hidden = torch.rand(3, 1, 20, 20, generator=torch.Generator().manual_seed(2)) < 0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    plain = logits(model, ids, attention_mask=mask)
    assert torch.equal(logits(patch(model), ids, attention_mask=mask), plain)


def test_training_is_the_original(name: str) -> None:
    model, ids = make(name), tokens()
    grads = []
    for change in (lambda m: m, patch):
        change(model).train().zero_grad()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.eval()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_with_gradient_checkpoints_is_the_original(name: str, reentrant: bool) -> None:
    model, ids = patch(make(name)).train(), tokens()
    grads = []
    for checkpoints in (False, True):
        model.zero_grad()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert model.is_gradient_checkpointing
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_block_in_training_mode_gets_what_its_original_needs(name: str) -> None:
    model, ids = make(name), tokens()
    plain = logits(model, ids)
    patched_modules(patch(model))[1].train()
    assert torch.equal(logits(model, ids), plain)  # no dropout is configured


# -- the owner -----------------------------------------------------------------------------


class NoSquares(TorchDispatchMode):
    """Fails when an operation makes a tensor that grows with N times M."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor):
                big = made.untyped_storage().nbytes() >= self.n * self.n
                assert not big, f"{func} makes {tuple(made.shape)}"
        return out


@pytest.fixture
def attention_without_scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backends that run on a CPU do make scores; the kernel does not."""

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        assert kwargs["causal"]
        return q.clone()

    monkeypatch.setattr(ScoreBiasModule, "forward", forward)
    yield


@pytest.mark.usefixtures("attention_without_scores")
@pytest.mark.parametrize("padded", [False, True])
def test_nothing_of_quadratic_size_is_made_around_the_kernel(name: str, padded: bool) -> None:
    n = 1500
    model, ids = patch(make(name)), tokens(1, n)
    mask = padding(2, n)[:1] if padded else None
    with NoSquares(n), torch.no_grad():
        model.get_decoder()(ids, attention_mask=mask)
    unpatch_model(model)
    with pytest.raises(AssertionError, match="makes"), NoSquares(n), torch.no_grad():
        model.get_decoder()(ids, attention_mask=mask)


def test_owner_and_attention_come_and_go_together(name: str) -> None:
    model, ids = make(name), tokens()
    plain, classes = logits(model, ids), [type(m) for m in model.modules()]
    with patched(model, backend="eager"):
        assert len(patched_owners(model)) == OWNERS[name]
        assert len(patched_modules(model)) == 2
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(logits(model, ids), plain)
    patch(model)
    with patched(model, backend="eager"):
        pass
    assert len(patched_modules(model)) == 2 and patched_owners(model)
    assert unpatch_model(model) == 2
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half().float()])
def test_a_cast_after_patching_rounds_no_slope_and_no_position(
    name: str, cast: Callable[[Any], Any]
) -> None:
    """Half of the tokens are beyond 256, where bfloat16 has no odd positions."""
    ids, mask = tokens(2, 512), padding(2, 512)
    before, after = patch(cast(make(name))), cast(patch(make(name)))
    expected = logits(before, ids, attention_mask=mask)
    assert torch.equal(logits(after, ids, attention_mask=mask), expected)
    slopes = [m.score_bias.bias.terms[0].slopes for m in patched_modules(after)]
    fresh = inspect_model(make(name)).sites[0].bias.terms[0].slopes
    assert slopes and all(torch.equal(own, fresh) for own in slopes)


def test_patching_twice_is_patching_once_and_touches_no_other_model(name: str) -> None:
    model, other, ids, mask = make(name), make(name), tokens(), padding()
    plain = logits(other, ids, attention_mask=mask)
    once = logits(patch(model), ids, attention_mask=mask)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    assert torch.equal(logits(patch(model), ids, attention_mask=mask), once)
    assert list(model.state_dict()) == keys
    assert [type(m).__mro__ for m in model.modules()] == [c.__mro__ for c in classes]
    assert not patched_owners(other) and not patched_modules(other)
    assert torch.equal(logits(other, ids, attention_mask=mask), plain)
    assert not torch.equal(once, plain)


def test_one_layer_left_alone_means_all(name: str) -> None:
    model = make(name)
    sites = [site.name for site in inspect_model(model).sites]
    plan = patch_model(model, exclude=[sites[1]])
    assert [site.status for site in plan.sites] == ["left alone", "left alone"]
    assert f"shares its bias with {sites[1]!r}" in plan.sites[0].reason
    assert not patched_owners(model) and not patched_modules(model)


def test_attention_without_its_model_is_unsupported(name: str) -> None:
    layer = next(m for m in make(name).modules() if type(m).__name__.endswith("Attention"))
    (site,) = inspect_model(layer).sites
    assert site.status == "unsupported" and "not part of this model" in site.reason


def test_a_replaced_forward_of_the_owner_is_respected(name: str) -> None:
    model = make(name)
    decoder = model.get_decoder()
    own = decoder.forward
    decoder.forward = lambda *args, **kwargs: own(*args, **kwargs)
    plan = inspect_model(model)
    assert {site.status for site in plan.sites} == {"unsupported"}
    assert "forward was replaced" in plan.sites[0].reason


def test_hooks_stay_and_fire_once_per_call(name: str) -> None:
    model, ids, calls = make(name), tokens(), []
    for where, module in model.named_modules():
        if module is model.get_decoder() or type(module).__name__.endswith("Attention"):
            for kind in ("forward_pre", "forward"):
                register = getattr(module, f"register_{kind}_hook")
                register(lambda *_, call=(where, kind): calls.append(call))
    logits(model, ids)
    before = calls.copy()
    assert len(before) == 6
    calls.clear()
    logits(patch(model), ids)
    assert calls == before


def test_adapters_of_the_projections_act_as_in_the_original(name: str) -> None:
    model, ids = make(name), tokens()
    assert add_adapters(model, lambda where: ".attn." in f".{where}" or "attention." in where) == 4
    plain, outs = copy.deepcopy(model), []
    patch(model)
    for enabled in (True, False):
        switch(model, enabled)
        switch(plain, enabled)
        outs.append(logits(plain, ids))
        assert_parity(logits(model, ids), outs[-1], true_logits(plain, ids))
    assert (outs[0] - outs[1]).abs().max() > 0.1


def test_copies_and_pickles_compute_the_same(name: str) -> None:
    model, ids, mask = patch(make(name)), tokens(), padding()
    expected = logits(model, ids, attention_mask=mask)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = {id(m) for m in made.modules()}
        assert all(id(m) in own for owner in patched_owners(made) for m in owner._consumers)
        assert torch.equal(logits(made, ids, attention_mask=mask), expected)


def test_slopes_are_those_of_the_model(name: str) -> None:
    model = make(name)
    (term,) = inspect_model(model).sites[0].bias.terms
    expected = {"bloom": [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]}
    expected["mpt"] = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    expected["gpt2"] = expected["bloom"]
    expected["falcon"] = [slope / math.sqrt(8) for slope in expected["bloom"]]
    torch.testing.assert_close(term.slopes, torch.tensor(expected[name]))


def two_part_slopes(heads: int) -> list[float]:
    """Press et al.: those of the next smaller power of two, and every other one of the larger."""
    smaller = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * i / smaller) for i in range(1, smaller + 1)]
    return (first + [2 ** (-4 * i / smaller) for i in range(1, 2 * smaller, 2)])[:heads]


@pytest.mark.parametrize(("heads", "size"), [(6, 64), (12, 8), (40, 8), (50, 8)])
def test_slopes_of_any_number_of_heads_and_of_any_size(name: str, heads: int, size: int) -> None:
    """Falcon divides its bias, rounded to bfloat16, by the root of the size; the others do not."""
    model = make(name)
    attribute = {"bloom": ("hidden_size", "n_head"), "mpt": ("d_model", "n_heads")}
    attribute |= {"falcon": ("hidden_size", "num_attention_heads"), "gpt2": ("n_embd", "n_head")}
    config = copy.deepcopy(model.config)
    for key, value in zip(attribute[name], (heads * size, heads), strict=True):
        setattr(config, key, value)
    (term,) = inspect_model(type(model)(config).eval()).sites[0].bias.terms
    expected = torch.tensor(two_part_slopes(heads))
    rounding = {"rtol": 1e-6, "atol": 0.0}
    if name == "falcon":
        expected, rounding = expected / math.sqrt(size), {"rtol": 2**-8, "atol": 0.0}
    torch.testing.assert_close(term.slopes, expected, **rounding)


@pytest.mark.parametrize(
    "renew", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)).double().float()]
)
def test_slopes_that_are_changed_by_hand_are_noticed(renew: Callable[[Any], Any]) -> None:
    """As one does to read beyond the trained length."""
    model, ids = patch(make("gpt2")), tokens()
    expected = logits(model, ids)
    model = renew(model)
    assert torch.equal(logits(model, ids), expected)
    model.get_decoder().slopes.mul_(0.5)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(StaleTermsError, match="AlibiGPT2Model makes its bias from has changed"):
            logits(each, ids)
    with patched(model, backend="eager"):
        logits(model, ids)
    with pytest.raises(StaleTermsError):
        logits(model, ids)
    plain = copy.deepcopy(model)
    unpatch_model(plain)
    assert_parity(logits(patch(model), ids), logits(plain, ids), true_logits(plain, ids))


def test_falcon_with_rotary_positions_is_left_alone() -> None:
    plan = inspect_model(make("falcon", alibi=False))
    assert {site.status for site in plan.sites} == {"left alone"}
    assert "rotary" in plan.sites[0].reason


def test_bloom_that_emulates_tensor_parallelism_is_unsupported() -> None:
    plan = inspect_model(make("bloom", pretraining_tp=2, slow_but_exact=True))
    assert {site.status for site in plan.sites} == {"unsupported"}


def test_tokens_say_for_what_length_to_plan(name: str) -> None:
    assert inspect_model(make(name), tokens=123).sites[0].n == 123


def test_a_folder_converts_and_loads(name: str, tmp_path: Path) -> None:
    model, ids, mask = make(name), tokens(), padding()
    model.save_pretrained(tmp_path / "model")
    done = convert_checkpoint(tmp_path / "model")
    assert done.output == tmp_path / "model.flashbias" and len(done.plan.patched) == 2
    loaded = load_model(done.output, backend="sdpa")
    assert len(patched_owners(loaded)) == OWNERS[name]
    expected = logits(patch(model), ids, attention_mask=mask)
    assert torch.equal(logits(loaded, ids, attention_mask=mask), expected)
    assert torch.equal(
        loaded.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4)
    )
