"""Scores are followed through whatever models do to them, and nothing is made up."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert import SiteProbe, probe_model

H, N, D = 2, 10, 4
BIAS = torch.randn(H, N, N, generator=torch.Generator().manual_seed(3))
Scores = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Attention whose scores are made by a function of q and k, (B, H, N, D)."""

    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.num_heads = H
        self.qkv = nn.Linear(8, 3 * H * D)
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.scores(q, k).softmax(-1).to(v.dtype) @ v


def probe(module: nn.Module, batch: int = 3) -> SiteProbe:
    x = torch.randn(batch, N, 8, generator=torch.Generator().manual_seed(1))
    (site,) = probe_model(module, x).sites
    return site


def in_place(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.5
    scores += BIAS
    return scores


def in_part(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * 0.5
    scores[:, :, 1:, 1:] += BIAS[:, 1:, 1:]
    scores[:, :, :1] = scores[:, :, :1] + BIAS[:, :1]
    scores[:, :, 1:, :1] += BIAS[:, 1:, :1]
    return scores


def windows(q: Tensor, k: Tensor) -> Tensor:
    scores = (q @ k.mT).view(-1, 1, H, N, N) * 0.5 + BIAS
    return scores.view(-1, H, N, N)


def baddbmm(q: Tensor, k: Tensor) -> Tensor:
    batch = len(q)
    bias = BIAS.repeat(batch, 1, 1)
    return torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, beta=1, alpha=0.5).view(
        batch, H, N, N
    )


def of_keys_first(q: Tensor, k: Tensor) -> Tensor:
    return (k @ q.mT / 2).transpose(-1, -2) + BIAS


def two_products(q: Tensor, k: Tensor) -> Tensor:
    """A smaller product, over one axis of the keys, is part of the bias."""
    rows = torch.einsum("bhnd,cd->bhnc", q * 0, torch.ones(2, D)).repeat_interleave(N // 2, -1)
    return q @ k.mT * 0.5 + (rows + BIAS)


WAYS: dict[str, Scores] = {
    "add": lambda q, k: q @ k.mT * 0.5 + BIAS,
    "bias first": lambda q, k: BIAS + (0.5 * q) @ k.mT,
    "subtract": lambda q, k: q @ k.mT / 2 - (-BIAS),
    "from the other side": lambda q, k: -((-BIAS) - q @ k.mT / 2),
    "alpha": lambda q, k: torch.add(q @ k.mT / 2, BIAS, alpha=1.0),
    "scaled together": lambda q, k: (q @ k.mT + 2 * BIAS) * 0.5,
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) * 0.5 + BIAS,
    "half and half": lambda q, k: (q * 0.5**0.5) @ (k * 0.5**0.5).mT + BIAS / 4 + BIAS * 0.75,
    "wider": lambda q, k: (q @ k.mT * 0.5).double() + BIAS,
    "clamped": lambda q, k: (q @ k.mT * 0.5 + BIAS).clamp(min=-1e9),
    "in place": in_place,
    "in part": in_part,
    "windows": windows,
    "baddbmm": baddbmm,
    "keys first": of_keys_first,
    "two products": two_products,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_add_a_bias(way: str) -> None:
    site = probe(Attention(WAYS[way]))
    assert (site.kind, site.seen) == ("dense", "softmax")
    assert (site.heads, site.n, site.m, site.head_dim) == (H, N, N, D)
    assert site.scale == pytest.approx(0.5, rel=1e-6) and not site.causal
    assert [note for note in site.notes if "fewer than 16" not in note] == []
    assert site.bias is not None and site.bias.shape == (1, H, N, N)
    # a bias that was multiplied is rounded once or twice more
    allowed = 2 * torch.finfo(torch.float32).eps * float(BIAS.abs().max())
    assert float((site.bias[0] - BIAS).abs().max()) <= allowed


def test_a_plain_sum_is_recovered_bit_for_bit() -> None:
    site = probe(Attention(WAYS["add"]))
    assert site.bias is not None and torch.equal(site.bias[0], BIAS)


def test_half_precision() -> None:
    rounded = BIAS.bfloat16()
    site = probe(Attention(lambda q, k: q @ k.mT * 0.5 + rounded).bfloat16())
    assert site.kind == "dense" and site.scale == 0.5
    assert site.bias is not None and site.bias.dtype == torch.bfloat16
    assert torch.equal(site.bias[0], rounded)
    wider = probe(Attention(lambda q, k: (q @ k.mT * 0.5).float() + BIAS).bfloat16())
    assert wider.bias is not None and torch.equal(wider.bias[0], BIAS)
    assert not any("left over" in note for note in wider.notes)


def causal() -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).triu(1)


MASKS: dict[str, Scores] = {
    "masked_fill": lambda q, k: (q @ k.mT / 2 + BIAS).masked_fill(causal(), -math.inf),
    "where": lambda q, k: torch.where(causal(), -1e9, q @ k.mT / 2 + BIAS),
    "where not": lambda q, k: torch.where(~causal(), q @ k.mT / 2 + BIAS, -1e9),
    "added": lambda q, k: q @ k.mT / 2 + BIAS + causal() * -1e9,
    "added to the bias": lambda q, k: q @ k.mT / 2 + BIAS.masked_fill(causal(), -math.inf),
    "smallest number": lambda q, k: (
        q @ k.mT / 2 + BIAS.masked_fill(causal(), torch.finfo(torch.float32).min)
    ),
}


@pytest.mark.parametrize("way", MASKS)
def test_masks_are_no_bias(way: str) -> None:
    site = probe(Attention(MASKS[way]))
    assert site.causal and site.kind == "dense" and "causal" in site.notes
    assert site.bias is not None
    assert torch.equal(site.bias[0], BIAS.masked_fill(causal(), 0))


def test_a_mask_alone_is_nothing_to_convert() -> None:
    site = probe(Attention(lambda q, k: (q @ k.mT / 2).masked_fill(causal(), -1e9)))
    assert site.kind == "none" and site.causal


def test_a_cap_between_product_and_softmax_is_told() -> None:
    site = probe(Attention(lambda q, k: torch.tanh(q @ k.mT / 2) + BIAS))
    assert site.kind == "input-dependent"
    assert any("between product and softmax: tanh" in note for note in site.notes)


def test_mixed_heads_are_told() -> None:
    mix = torch.randn(H, H, generator=torch.Generator().manual_seed(0))
    module = Attention(lambda q, k: torch.einsum("gh,bhij->bgij", mix, q @ k.mT / 2))
    x = torch.randn(3, N, 8, generator=torch.Generator().manual_seed(1))
    found = probe_model(module, x)
    assert found.sites == ()
    (note,) = found.notes
    assert "a softmax over (3, 2, 10, 10) in the model was not followed" in note


class Sdpa(nn.Module):
    """SDPA with given options, under the functional API or a module of torch."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.num_heads = H
        self.qkv = nn.Linear(8, 3 * H * D)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **self.options)  # type: ignore[arg-type]


def test_sdpa_with_a_bias_a_mask_or_neither() -> None:
    biased = probe(Sdpa(attn_mask=BIAS, scale=0.25))
    assert (biased.seen, biased.kind, biased.scale) == ("sdpa", "dense", 0.25)
    assert biased.bias is not None and torch.equal(biased.bias[0], BIAS)
    assert any("scale is 0.25, not 1/sqrt(4) = 0.5" in note for note in biased.notes)
    assert probe(Sdpa()).kind == "none"
    for options in ({"is_causal": True}, {"attn_mask": ~causal()}):
        masked = probe(Sdpa(**options))
        assert masked.kind == "none" and masked.causal
    row = probe(Sdpa(attn_mask=(torch.arange(N) < 7)[None]))
    assert "a mask hides keys, the same for both inputs" in row.notes


class Torch(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, H, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        mask = BIAS.repeat(len(x), 1, 1)
        out: Tensor = self.attn(x, x, x, attn_mask=mask, need_weights=self.weights)[0]
        return out


@pytest.mark.parametrize("weights", [True, False])
def test_attention_of_torch(weights: bool) -> None:
    """Its body is hidden from a mode for functions; below, fused kernels are seen, too."""
    site = probe(Torch(weights))
    assert (site.site, site.kind, site.heads) == ("attn", "dense", H)
    assert site.seen == ("softmax" if weights else "sdpa")
    assert site.scale == pytest.approx(0.5, rel=1e-6)
    assert site.bias is not None and torch.equal(site.bias[0], BIAS)


def test_softmax_in_a_module_of_its_own_belongs_to_the_module_around_it() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention(lambda q, k: q @ k.mT / 2 + BIAS)
            self.attn.softmax = nn.Softmax(-1)
            self.attn.forward = self.around  # type: ignore[method-assign]

        def around(self, x: Tensor) -> Tensor:
            q, k, v = self.attn.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            return self.attn.softmax(self.attn.scores(q, k)) @ v  # type: ignore[operator]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attn(x)
            return out

    assert probe(Inner()).site == "attn"


def test_two_attentions_in_one_module_have_numbers() -> None:
    class Twice(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            first = (q @ k.mT / 2 + BIAS).softmax(-1) @ v
            return (q @ k.mT / 2).softmax(-1) @ first

    x = torch.randn(3, N, 8, generator=torch.Generator().manual_seed(1))
    first, second = probe_model(Twice(lambda q, k: q), x).sites
    assert (first.site, first.kind) == ("", "dense")
    assert (second.site, second.name, second.kind) == ("#2", "", "none")


def test_a_module_that_runs_again_is_looked_at_once() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention(lambda q, k: q @ k.mT / 2 + BIAS)
            self.back = nn.Linear(D, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.back(self.attn(x).mean(1))
            return x

    site = probe(Again())
    assert site.calls == 3
    assert "runs 3 times in one pass; the first was looked at" in site.notes
