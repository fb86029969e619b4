"""The registered functions by themselves: masks, arguments, and what they refuse."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from flashbias_convert import UsageError, register_attention
from flashbias_convert.attention_interface import RESERVED, attend
from flashbias_convert.errors import UnsupportedTermError
from tests.interface_models import make, padding, tokens
from tests.support import assert_parity

B, H, N, M, D = 3, 4, 12, 12, 8
NAME = register_attention("tested_function", backend="sdpa")


class Module(nn.Module):
    """An attention module, as far as the functions look at it."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(n: int = N, m: int = M) -> tuple[Tensor, Tensor, Tensor]:
    return random(B, H, n, D), random(B, H, m, D, seed=1), random(B, H, m, D, seed=2)


def run(module: Module, *args: Any, **options: Any) -> Tensor:
    return attend(module, *args, backend="sdpa", **options)[0]


SEEN = random(B, 1, N, M, seed=3) < 1
SEEN[..., 0] = True
MASKS = {
    "none": None,
    "rows": SEEN[:, :, :1],
    "boolean": SEEN,
    "boolean of heads": SEEN.expand(B, H, N, M) & (random(1, H, 1, M) < 2),
    "three dimensions": SEEN[0],
    "added": random(B, 1, N, M, seed=4),
    "added to keys": random(B, 1, 1, M, seed=4),
}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_like_the_function_for_torch(mask: str, causal: bool, biased: bool) -> None:
    bias = random(1, H, N, M, seed=5) if biased else None

    def outputs(function: Any, dtype: torch.dtype) -> list[Tensor]:
        given = [x.to(dtype).requires_grad_() for x in qkv()]
        options: dict[str, Any] = {"scaling": 0.5}
        if bias is not None:
            given.append(options.setdefault("position_bias", bias.to(dtype).requires_grad_()))
        held = MASKS[mask]
        held = held.to(dtype) if held is not None and held.is_floating_point() else held
        out = function(Module(causal), *given[:3], held, **options)
        out = out[0] if isinstance(out, tuple) else out
        return [out, *torch.autograd.grad(out.square().sum(), given)]

    ours = outputs(run, torch.float32)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    plain, exact = (outputs(sdpa, dtype) for dtype in (torch.float32, torch.float64))
    for got, reference, truth in zip(ours, plain, exact, strict=True):
        assert_parity(got, reference, truth, factor=4.0)


def test_padding_and_causality_from_the_end() -> None:
    q, k, v = qkv(n=5)
    seen = torch.ones(B, M, dtype=torch.bool)
    seen[0, :3] = False
    below = torch.arange(M) <= torch.arange(5)[:, None] + M - 5
    wanted = run(Module(True), q, k, v, seen[:, None, None] & below)
    torch.testing.assert_close(run(Module(True), q, k, v, seen), wanted)
    torch.testing.assert_close(run(Module(True), q, k, v, seen.long()), wanted)


def test_the_tail_of_an_empty_cache_is_not_seen() -> None:
    q, k, v = qkv(n=5)
    bias = random(1, H, 5, M)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"](Module(True), q, k, v, None, position_bias=bias)[0]
    torch.testing.assert_close(run(Module(True), q, k, v, None, position_bias=bias), sdpa)


def test_queries_of_one_sample() -> None:
    q, k, v = qkv()
    expanded = run(Module(), q[:1].expand(B, -1, -1, -1), k, v)
    torch.testing.assert_close(run(Module(), q[:1], k, v), expanded)


@pytest.mark.parametrize(
    "mask", [torch.zeros(B, M), SEEN.int(), SEEN.any(0)[0, 0], SEEN[None]], ids=str
)
def test_masks_without_a_meaning(mask: Tensor) -> None:
    with pytest.raises(UnsupportedTermError, match="no known meaning"):
        run(Module(), *qkv(), mask)


def test_padding_of_another_batch() -> None:
    with pytest.raises(ValueError, match="key_mask"):
        run(Module(), *qkv(), torch.ones(B + 1, M, dtype=torch.bool))


def test_windows_must_be_in_the_mask() -> None:
    with pytest.raises(UnsupportedTermError, match="sliding window of 4 among 12"):
        run(Module(), *qkv(), None, sliding_window=4)
    whole = run(Module(), *qkv(), None, sliding_window=M)
    assert torch.equal(whole, run(Module(), *qkv()))
    assert torch.equal(run(Module(), *qkv(), SEEN, sliding_window=4), run(Module(), *qkv(), SEEN))


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_sparse_attention_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedTermError, match=name):
        run(Module(), *qkv(), None, **{name: torch.zeros(1)})


@pytest.mark.parametrize(
    "given", [{"softcap": 30.0}, {"s_aux": torch.zeros(H)}, {"output_attentions": True}]
)
def test_a_module_without_eager_attention(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedTermError, match="Module has no eager attention"):
        run(Module(), *qkv(), None, **given)


def test_weights_that_are_recorded_by_hooks() -> None:
    from transformers.utils.output_capturing import _active_collector

    token = _active_collector.set({"attentions": []})
    try:
        with pytest.raises(UnsupportedTermError, match="asks for attention weights"):
            run(Module(), *qkv())
    finally:
        _active_collector.reset(token)


@pytest.mark.parametrize("word", RESERVED)
def test_reserved_names(word: str) -> None:
    with pytest.raises(UsageError, match="cannot be a name"):
        register_attention(f"my{word}bias")


def test_registering() -> None:
    with pytest.raises(UsageError, match="backend must be one of"):
        register_attention("some_bias", backend="fast")
    AttentionInterface.register("taken_bias", lambda *_: None)
    with pytest.raises(UsageError, match="another attention"):
        register_attention("taken_bias")
    for backend in ("eager", "sdpa", "sdpa"):
        assert register_attention("some_bias", backend=backend) == "some_bias"
    assert ALL_ATTENTION_FUNCTIONS["some_bias"].keywords == {"backend": "sdpa"}
    assert register_attention() == "fused_bias"


def test_a_transformers_without_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(UsageError, match="no attention interface"):
        register_attention()


def masks_of(name: str, mask: Tensor | None, make_mask: Any = create_causal_mask) -> Any:
    model = make(name, NAME)
    states = torch.zeros(3, 20, 32)
    given = {} if make_mask is create_bidirectional_mask else {"past_key_values": None}
    if given and "cache" in inspect.signature(make_mask).parameters:  # another name for it
        given = {"cache": None}
    return make_mask(model.config, inputs_embeds=states, attention_mask=mask, **given)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_smallest_masks(side: str) -> None:
    mask, none = padding(side), torch.ones(3, 20, dtype=torch.long)
    real = mask.bool()
    assert masks_of("llama", None) is None and masks_of("llama", none) is None
    assert torch.equal(masks_of("llama", mask), real)
    assert masks_of("t5", none) is None, "a model that flash attention cannot serve"
    assert torch.equal(masks_of("t5", mask), real[:, None, None] & torch.ones(20, 20).tril().bool())
    assert masks_of("bert", none, create_bidirectional_mask) is None
    assert torch.equal(masks_of("bert", mask, create_bidirectional_mask), real[:, None, None])
    assert masks_of("mistral", mask).shape == (3, 20), "its full mask has no window"
    added = masks_of("bloom", None)
    assert added.is_floating_point() and added.shape == (3, 1, 20, 20)


@torch.no_grad()
def test_sinks_run_the_eager_attention() -> None:
    given = {"input_ids": tokens(), "attention_mask": padding("left")}
    ours, eager = make("gpt_oss", NAME), make("gpt_oss")
    eager.load_state_dict(ours.state_dict())  # its sinks are random
    real = padding("left").bool()
    torch.testing.assert_close(ours(**given).logits[real], eager(**given).logits[real])
