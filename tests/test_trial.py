"""Modules are trusted if a copy of them returns what their parts suggest, and not otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert.recipe import UnsupportedSite
from flashbias_convert.trial import Trial, has_parts, plain_attention, try_windows

N, DIM, HEADS = 6, 8, 2


class Windows(nn.Module):
    """Attention in windows with a bias (H, N, N), by loops."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.nothing = HEADS, None
        self.qkv, self.proj, self.drop = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Dropout()
        self.bias = nn.Parameter(torch.zeros(HEADS, N, N))

    def weights(self, q: Tensor, k: Tensor, head: int, mask: Tensor | None) -> Tensor:
        scores = q @ k.T / math.sqrt(DIM // HEADS) + self.bias[head]
        return (scores if mask is None else scores + mask).softmax(-1)

    def forward(self, x: Tensor, mask: Tensor | None = None, word: str = "right") -> Tensor:
        assert word == "right"
        outs = []
        for window, tokens in enumerate(x):
            q, k, v = self.qkv(tokens).chunk(3, -1)
            added = None if mask is None else mask[window % len(mask)]
            parts = []
            for head in range(HEADS):
                own = slice(head * DIM // HEADS, (head + 1) * DIM // HEADS)
                parts.append(self.weights(q[:, own], k[:, own], head, added) @ v[:, own])
            outs.append(torch.cat(parts, -1))
        return self.drop(self.proj(torch.stack(outs)))


class Cosine(Windows):
    def weights(self, q: Tensor, k: Tensor, head: int, mask: Tensor | None) -> Tensor:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        scores = (3.0 + head) * q @ k.T + self.bias[head]
        return (scores if mask is None else scores + mask).softmax(-1)


class Unmasked(Windows):
    """Has all the parts, and drops its mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None, word: str = "right") -> Tensor:
        return super().forward(x)


SCALE = {"scale": (DIM // HEADS) ** -0.5}


def try_out(module: Any, **how: Any) -> None:
    trial = Trial(module, "windows")
    trial.redraw(trial.twin.bias)
    try_windows(trial, trial.twin.bias, **(how or SCALE))


def test_windows_that_are_what_they_look_like() -> None:
    try_out(Windows())
    try_out(Windows(), **SCALE, handed={"word": "right"})
    try_out(Cosine(), scale=torch.tensor([3.0, 4.0], dtype=torch.float64), cosine=True)


@pytest.mark.parametrize("shape", [(), (1,), (HEADS + 1,)])
def test_a_scale_without_an_entry_for_each_head_is_unsupported(shape: tuple[int, ...]) -> None:
    """Calls of the patched module would fail, each of them."""
    with pytest.raises(UnsupportedSite, match="its scale is a tensor"):
        try_out(Windows(), scale=torch.full(shape, SCALE["scale"]))


@pytest.mark.parametrize(
    "how",
    [
        {"scale": 1.0},
        {**SCALE, "cosine": True},
        {**SCALE, "project": lambda x: x.repeat(1, 1, 3)},
    ],
)
def test_windows_that_compute_something_else(how: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSite, match="the parts of windows, but computes something else"):
        try_out(Windows(), **how)


def test_a_mask_that_is_dropped_is_seen() -> None:
    with pytest.raises(UnsupportedSite, match="something else"):
        try_out(Unmasked())


def test_a_forward_that_fails_is_said() -> None:
    with pytest.raises(UnsupportedSite, match="cannot be tried out: AssertionError"):
        try_out(Windows(), **SCALE, handed={"word": "wrong"})


def test_the_module_stays_as_it_is() -> None:
    module = Windows().half().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trial = Trial(module, "windows")
    twin = trial.twin
    assert not twin.training and not twin.drop.training and twin.bias.dtype == torch.float64
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    for parameter in twin.parameters():
        trial.redraw(parameter)
    twin.bias.add_(1.0)
    assert module.training and all(p.requires_grad for p in module.parameters())
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())


def test_every_trial_has_the_same_numbers_whatever_the_seed() -> None:
    def numbers() -> list[Tensor]:
        trial = Trial(Windows(), "windows")
        trial.redraw(trial.twin.bias, std=0.5)
        return [trial.draw(2, 3), trial.twin.bias, trial.draw(3)]

    before = numbers()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert all(map(torch.equal, before, numbers()))
    assert before[0].dtype == torch.float64 and 0.3 < float(before[1].std()) < 0.7


@pytest.mark.parametrize(
    "call",
    [
        lambda right: right[:1],
        lambda right: right[..., :2],
        lambda right: right.float(),
        lambda right: right + 1e-5,
        lambda right: right * torch.nan,
        lambda right: (right,),
        lambda right: None,
    ],
)
def test_anything_but_the_right_tensor_is_refused(call: Callable[[Tensor], Any]) -> None:
    """Another shape and another dtype, too, and nothing is broadcast."""
    trial, right = Trial(nn.Identity(), "a thing"), torch.ones(4, 3, dtype=torch.float64)
    trial.require(lambda: right.clone(), right)
    with pytest.raises(UnsupportedSite, match="parts of a thing"):
        trial.require(lambda: call(right), right)


def test_no_gradients_are_recorded() -> None:
    trial, right = Trial(nn.Identity(), "a thing"), torch.ones(1, dtype=torch.float64)
    trial.require(lambda: right if not torch.is_grad_enabled() else None, right)


def test_parts() -> None:
    module = Windows()
    assert has_parts(module, "num_heads", "nothing", "qkv") and has_parts(module)
    assert has_parts(module, "qkv", "proj", kind=nn.Linear)
    assert not has_parts(module, "qkv", "drop", kind=nn.Linear)
    assert not has_parts(module, "nothing", kind=nn.Module)
    assert not has_parts(module, "num_heads", "lacking")
    assert has_parts(module, "num_heads", "bias", kind=(int, Tensor))


def test_plain_attention_has_other_numbers_of_keys() -> None:
    q, k = torch.randn(2, 3, 4, 5).double(), torch.randn(2, 3, 7, 5).double()
    v, bias = torch.randn(2, 3, 7, 5).double(), torch.randn(3, 4, 7).double()
    out = plain_attention(q, k, v, bias, scale=0.3)
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, bias.expand(2, 3, 4, 7), scale=0.3)
    assert out.shape == (2, 4, 15)
    torch.testing.assert_close(out, wanted.transpose(1, 2).flatten(2), rtol=1e-12, atol=1e-12)
