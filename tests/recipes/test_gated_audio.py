"""BEATs and WavLM with the interface of Microsoft's repository, which no package offers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import fallback, inspect_model, patch_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.recipe import Registry
from flashbias_convert.recipes.gated_audio import distance_values
from scripts.whole_models.copied_audio import (
    MultiheadAttention,
    TransformerEncoder,
    beats,
    wavlm,
)
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, NoSquares, randomised

N, WIDTH, HEADS = 23, 16, 2
TABLE = ("relative_attention_bias.weight",)
Make = Callable[..., TransformerEncoder]


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that distances here share some."""
    monkeypatch.setattr(MultiheadAttention, "num_buckets", 16)
    monkeypatch.setattr(MultiheadAttention, "max_distance", 20)


def padding() -> Tensor:
    """True for frames that are padding, (3, N)."""
    mask = torch.zeros(3, N, dtype=torch.bool)
    mask[0, -7:], mask[1, -2:] = True, True
    return mask


def sound(model: nn.Module, n: int = N) -> Tensor:
    x = torch.randn(3, n, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.bfloat16().half().to(next(model.parameters()).dtype)


def built(make: Make, **how: Any) -> Any:
    model = make(2, WIDTH, HEADS, **how)
    return randomised(model, std=0.3, relative_attention_bias=2.0, grep_a=1.0, grep_linear=1.0)


def case(make: Make, padded: bool = True, **how: Any) -> Case:
    def run(model: Any) -> Tensor:
        mask = padding() if padded else None
        out: Tensor = model(sound(model), mask)
        return out if mask is None else out[~mask]

    return Case(lambda: built(make, **how), run, TABLE, {"patched": 2})


CASES = {
    "beats": case(beats, padded=False),
    "beats padded": case(beats),
    "beats without gates": case(beats, gated=False),
    "wavlm": case(wavlm, padded=False),
    "wavlm padded": case(wavlm),
    "wavlm without gates": case(wavlm, gated=False),
}
BOTH = ("beats padded", "wavlm padded")


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


@pytest.mark.parametrize("name", BOTH)
def test_gates_and_padding_matter(name: str) -> None:
    one, model = CASES[name], CASES[name].make()
    plain = one.output(model)
    with torch.no_grad():
        whole = model(sound(model))[~padding()]
        for layer in model.layers:
            layer.self_attn.grep_a.zero_()
    assert (whole - plain).abs().max() > 1e-2
    assert (one.output(model) - plain).abs().max() > 1e-2


@pytest.mark.parametrize("name", BOTH)
def test_comes_and_goes(name: str) -> None:
    parity.check_comes_and_goes(CASES[name], pickles=name.startswith("beats"))


@pytest.mark.parametrize("name", BOTH)
def test_other_weights_bring_their_bias(name: str) -> None:
    parity.check_follows_weights(CASES[name])


@pytest.mark.parametrize("name", BOTH)
def test_training_is_the_original(name: str) -> None:
    parity.check_training(CASES[name], together=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", BOTH)
def test_a_file_loads(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parity.check_file(CASES[name], tmp_path, dtype)


@torch.no_grad()
@pytest.mark.parametrize("name", BOTH)
def test_compiles_in_one_graph(name: str) -> None:
    model = CASES[name].make()
    CASES[name].patched(model)
    expected = CASES[name].output(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(CASES[name].run(compiled), expected)


@pytest.mark.parametrize("name", BOTH)
def test_the_fused_path_gets_the_padding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    forward = ScoreBiasModule.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["key_mask"])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ScoreBiasModule, "forward", counted)
    model = CASES[name].make()
    CASES[name].patched(model)
    CASES[name].output(model)
    assert len(calls) == 2 and all(torch.equal(mask, ~padding()) for mask in calls)


@torch.no_grad()
@pytest.mark.parametrize("make", [beats, wavlm])
def test_nothing_of_quadratic_size_is_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the kernel: the backends that run on a CPU do make scores."""
    model = built(make)
    CASES["beats"].patched(model)
    monkeypatch.setattr(ScoreBiasModule, "forward", lambda self, q, k, v, **kwargs: q.clone())
    x = sound(model, 1500)
    with NoSquares(1500):
        model(x)


@pytest.mark.parametrize("name", BOTH)
def test_attention_weights_come_from_the_original(name: str) -> None:
    def run(model: Any) -> Any:
        return model(sound(model), padding(), need_weights=True)

    parity.check_attention_weights(CASES[name], run)


def causal() -> Tensor:
    return torch.full((N, N), -torch.inf).triu(1)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a mask of pairs": ({"attn_mask": causal()}, "no padding mask"),
    "a mask of numbers": ({"key_padding_mask": padding().byte()}, "no padding mask"),
    "scores": ({"before_softmax": True}, "asks for the scores"),
    "weights": ({"need_weights": True}, "attention weights"),
    "weights of heads": ({"need_head_weights": True}, "attention weights"),
    "other keys": ({"key": None}, "other keys"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CALLS)
def test_other_calls_run_the_original(name: str) -> None:
    """Of a layer that was handed a table, which it hands on."""
    options, reason = CALLS[name]
    model = built(beats)
    x = sound(model).transpose(0, 1)
    first, plain = (copy.deepcopy(layer.self_attn) for layer in model.layers)
    bias, table = first.compute_bias(N, N).repeat(3, 1, 1), distance_values(first, N)
    CASES["beats"].patched(model)
    given = {"key": x, "value": x, "key_padding_mask": padding(), "need_weights": False, **options}
    if name == "other keys":
        given["key"] = x.flip(0)
    expected = plain(x, **given, position_bias=bias)
    fallback._warn.cache_clear()
    with pytest.warns(BackendFallbackWarning, match=reason):
        out = model.layers[1].self_attn(x, **given, position_bias=table)
    assert torch.equal(out[0], expected[0]) and out[2] is table
    assert (out[1] is None) == (expected[1] is None)
    assert out[1] is None or torch.equal(out[1], expected[1])


@torch.no_grad()
@pytest.mark.parametrize("name", BOTH)
def test_a_layer_called_by_itself_runs_the_original(name: str) -> None:
    """Nobody told it that it may hand on less."""
    model, plain = CASES[name].make(), CASES[name].make()
    CASES[name].patched(model)
    x = sound(model).transpose(0, 1)
    right = plain.layers[0](x)[2]
    assert torch.equal(model.layers[0](x)[2], right)
    for handed in (right, right.flip(-1)):
        out, expected = (one.layers[1](x, pos_bias=handed) for one in (model, plain))
        assert torch.equal(out[0], expected[0]) and out[2] is handed


@torch.no_grad()
def test_a_streaming_mask_runs_the_original() -> None:
    model, plain = built(beats), built(beats)
    CASES["beats"].patched(model)
    x = sound(model)
    expected, bare = plain(x, padding(), causal()), plain(x, padding())
    fallback._warn.cache_clear()
    with pytest.warns(BackendFallbackWarning, match="no padding mask"):
        out = model(x, padding(), causal())
    assert torch.equal(out, expected) and (out - bare).abs().max() > 1e-2


class Twice(MultiheadAttention):
    def gate(self, x: Tensor) -> Tensor:
        return 2 * super().gate(x)


class Elsewhere(MultiheadAttention):
    """Its bias is none of the distance."""

    def compute_bias(self, queries: int, keys: int) -> Tensor:
        return super().compute_bias(queries, keys).cumsum(1)


class Dropping(MultiheadAttention):
    """It hands on something else than it was handed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights, handed = super().forward(*args, **kwargs)
        return out, weights, handed * 2


Dropping.__name__ = "MultiheadAttention"  # a class of the name, not one that is derived


@pytest.mark.parametrize("kind", [Twice, Elsewhere, Dropping])
def test_what_computes_something_else_is_not_trusted(kind: type[MultiheadAttention]) -> None:
    model = TransformerEncoder([kind(WIDTH, HEADS, True) for _ in range(2)], WIDTH)
    plan = inspect_model(model)
    first, second = plan.sites
    assert first.status == "unsupported" and "something else" in first.reason
    # the others are handed what the first makes
    other = "shares its bias" if kind is Elsewhere else "something else"
    assert second.status != "patched" and other in second.reason


def test_encoders_without_a_table_have_no_bias() -> None:
    model = TransformerEncoder([MultiheadAttention(WIDTH, HEADS, False)], WIDTH)
    (site,) = inspect_model(model).sites
    assert site.status == "left alone" and "no relative positions" in site.reason
    late = TransformerEncoder([MultiheadAttention(WIDTH, HEADS, i == 1) for i in range(2)], WIDTH)
    assert all("first layer" in site.reason for site in inspect_model(late).sites)


def test_layers_that_are_left_when_the_first_is_removed_have_no_bias() -> None:
    """As in the original: only the first layer of a WavLM has a table."""
    plain = built(wavlm).eval()
    model = copy.deepcopy(plain)
    patch_model(model)
    for each in (plain, model):
        each.layers = nn.ModuleList(list(each.layers)[1:])
    with torch.no_grad():
        torch.testing.assert_close(model(sound(model), padding()), plain(sound(plain), padding()))


def test_an_attention_without_its_encoder_is_unsupported() -> None:
    for one in (beats, wavlm):
        (site,) = inspect_model(built(one).layers[0].self_attn).sites
        assert site.status == "unsupported" and "TransformerEncoder" in site.reason


def test_other_classes_of_the_name_are_nobodys() -> None:
    assert Registry().find(nn.MultiheadAttention(WIDTH, HEADS)) is None
    assert Registry().find(type("MultiheadAttention", (nn.Module,), {})()) is None
