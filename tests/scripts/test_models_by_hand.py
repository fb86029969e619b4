"""Attention that the scripts for whole models write by hand computes what the original does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import LowRank
from tests.support import assert_parity

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "paper")]

from whole_models import (  # noqa: E402
    hand,
    language,
    measuring,
    plain,
    static_bias,
    vision,
    weather,
)  # fmt: skip
from whole_models.case import (  # noqa: E402
    BY_ROWS,
    FLEX,
    NO_BIAS,
    NONE_CUDNN,
    SDPA,
    SDPA_CUDNN,
    WITHOUT_BIAS,
    Case,
)
from whole_models.hand import HandAttention  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    added = bias.repeat(len(q) // len(bias), 1, 1, 1)
    return (q @ k.transpose(-1, -2) * scale + added).softmax(-1) @ v


@pytest.mark.parametrize("way", [SDPA, SDPA_CUDNN, FLEX, BY_ROWS])
@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("n", [16, 9])
def test_windows_by_hand_take_their_own_bias(way: str, windows: int, n: int) -> None:
    bias = torch.randn(windows, n, n, 2).movedim(-1, 1)
    q, k, v = torch.randn(3, 6, 2, n, 16).unbind(0)
    out = HandAttention(way, bias, 0.3)(q, k, v)
    exact = formula(*(x.double() for x in (q, k, v, bias)), 0.3)
    assert_parity(out, formula(q, k, v, bias, 0.3), exact)


@pytest.mark.parametrize(
    "way", ["original", SDPA, SDPA_CUDNN, FLEX, BY_ROWS, NO_BIAS, NONE_CUDNN, "exact"]
)
def test_attention_with_a_static_bias(way: str) -> None:
    bias = static_bias.StaticBias.factors(2, 16, 8, CPU)
    q, k, v = torch.randn(3, 1, 2, 16, 16).unbind(0)
    out = static_bias.attention(way, bias, torch.float32, 16)(q, k, v)
    added = bias.dense(torch.float32) * (way not in WITHOUT_BIAS)
    exact = formula(*(x.double() for x in (q, k, v, added)), 0.25)
    assert_parity(out, formula(q, k, v, added, 0.25), exact)


@pytest.mark.parametrize(
    "case",
    [
        vision.cases(True)["swinv2-b"],
        weather.cases(True)["pangu"],
        plain.cases(True)["plain-33"],
        language.cases(True)["gpt2-prefill-2k"],
        language.cases(True)["gpt2-decode-2k"],
        language.cases(True)["gpt2-decode-2k-growing"],
    ],
    ids=lambda case: case.name,
)
def test_what_is_written_by_hand_computes_what_the_original_does(case: Case) -> None:
    def output(way: str, dtype: torch.dtype) -> Tensor:
        ready = case.prepare(way, CPU, dtype)
        with torch.no_grad():
            found = measuring.outputs_of(ready.model(*ready.args, **ready.kwargs), case.batch)
        return next(iter(found.values()))

    truth, original = output("original", torch.float64), output("original", torch.float32)
    for way in (SDPA, SDPA_CUDNN, "exact"):
        assert_parity(output(way, torch.float32), original, truth)
    other = (output(NO_BIAS, torch.float32) - original).abs().max()
    assert other > 100 * (original.double() - truth).abs().max()


def test_factors_are_rounded_once_where_the_matrix_is() -> None:
    bias = static_bias.StaticBias.factors(2, 16, 8, CPU)
    splits = [bias.terms(d).terms[0].split for d in (torch.bfloat16, torch.float16, torch.float32)]
    assert splits == [0, 0, None]


@pytest.mark.parametrize("on_card", [True, False])
def test_only_cudnn_is_asked_for_on_a_card(on_card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    @contextlib.contextmanager
    def kernel(backend: Any) -> Iterator[None]:
        asked.append(backend)
        yield

    monkeypatch.setattr(hand, "sdpa_kernel", kernel)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: on_card))
    q = torch.randn(1, 2, 8, 8)
    for way in (SDPA, SDPA_CUDNN, NO_BIAS, NONE_CUDNN):
        HandAttention(way, torch.zeros(1, 2, 8, 8), 1.0)(q, q, q)
    assert asked == [hand.SDPBackend.CUDNN_ATTENTION] * (2 if on_card else 0)


def test_flex_attention_without_a_bias_is_no_bias() -> None:
    case = language.cases(True)["gpt2-prefill-2k"]

    def output(way: str, dtype: torch.dtype) -> Tensor:
        one = case.prepare(way, CPU, dtype)
        with torch.no_grad():
            found = measuring.outputs_of(one.model(*one.args, **one.kwargs), 1)
        return next(iter(found.values()))

    exact = output(NO_BIAS, torch.float64)
    assert_parity(output("none-flex", torch.float32), output(NO_BIAS, torch.float32), exact)


def test_pangu_at_the_rank_of_the_paper() -> None:
    """Factors of 56 columns at the fine scale, the dense bias elsewhere; near the original."""
    case = weather.cases(True)["pangu"]
    ready = case.prepare("svd-56", CPU, torch.float32)
    assert ready.approximate
    sites = [m for m in ready.model.modules() if isinstance(m, weather.EarthAttention3D)]
    hand_made = [m for m in ready.model.modules() if isinstance(m, weather.HandEarthAttention)]
    assert len(sites) == len(hand_made) == 4
    for site in sites:
        score_bias: Any = site.score_bias
        (term,) = [t for t in score_bias.bias.terms if isinstance(t, LowRank)]
        assert term.phi_k.shape[-1] == 56

    def output(way: str) -> Tensor:
        one = case.prepare(way, CPU, torch.float32)
        with torch.no_grad():
            return next(iter(measuring.outputs_of(one.model(*one.args), 1).values()))

    original, cut, none = (output(way) for way in ("original", "svd-56", NO_BIAS))
    assert 0 < (cut - original).norm() < (none - original).norm()


def test_bytes_of_biases() -> None:
    case = plain.cases(True)["plain-20"]

    def of(way: str) -> int:
        return measuring.bias_bytes(case.prepare(way, CPU, torch.bfloat16).model)

    assert of("original") == 2 * 2 * 20 * 20
    assert of("sdpa") == 2 * 2 * 20 * 32  # rows are padded
    assert of("none") == 0 < of("exact")
    case = language.cases(True)["gpt2-prefill-2k"]
    assert of("sdpa") == 2 * 4 * 20 * 32
