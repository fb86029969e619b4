"""Gradients of axial terms of any number of rows and columns, in one walk over the keys or more.

In half precision such terms are factors where those fit, as in `test_backward`; here they do not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashbias_convert import Axial
from flashbias_convert.attention import backward_launch, flashbias_attention
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.attention.backward_rows import COORDINATES
from flashbias_convert.attention.packing import unsupported
from flashbias_convert.attention.training_packing import pack_for_training
from flashbias_convert.attention.tuning import backward_settings
from tests.support import assert_parity

from .cases import Inputs
from .gradients import gradients, of_backend, plain_gradients
from .test_atomic import TWO_WALKS, WALK, launches, with_atomics
from .test_backward import check

FP32, HALF = torch.float32, torch.float16
#: more columns than factors of a term may have
WIDE = (150, 120)


def image(
    x: Inputs, high: int, wide: int, dtype: torch.dtype | None = None, **fields: Any
) -> Axial:
    """A term for keys anywhere in an image of `high` rows and `wide` columns.

    Args:
        x: the inputs.
        high, wide: sizes of the image.
        dtype: of its entries, that of q if nothing is said.
        **fields: `heads`, or the batch dimensions `batch_h` of rel_h and `batch_w` of rel_w.
    """
    own = len(fields["heads"]) if "heads" in fields else x.heads
    lead = [fields.pop(name, ()) for name in ("batch_h", "batch_w")]
    entries = [
        x.normal(*batch, own, x.n, size).to(x.dtype if dtype is None else dtype)
        for batch, size in zip(lead, (high, wide), strict=True)
    ]
    y, columns = x.integers(high, x.m), x.integers(wide, x.m)
    y[0], y[1], columns[2] = high - 1, 0, wide - 1  # the ends are there
    return Axial(rel_h=entries[0], rel_w=entries[1], y=y, x=columns, **fields)


def walks(monkeypatch: pytest.MonkeyPatch, x: Inputs, kernel: str, *terms: Any) -> int:
    """How many walks over the keys all gradients take."""
    with launches(monkeypatch) as names:
        gradients(x, x.bias(*terms), of_backend(kernel))
    return names.count("query_gradients_kernel")


@pytest.mark.parametrize(
    ("sizes", "expected"), [((131, 3), 2), ((5, 257), 3), ((128, 128), 1), ((129, 128), 2)]
)
def test_more_than_a_walk_holds(
    sizes: tuple[int, int],
    expected: int,
    kernel: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Causal and padded; no sizes fill a block."""
    x = Inputs(device, heads=1, n=17, m=39, d=12, dv=20)
    term = image(x, *sizes)
    assert walks(monkeypatch, x, kernel, term) == expected
    mask = x.integers(4, 2, x.m) > 0
    check(x, x.bias(term), kernel, causal=True, key_mask=mask)


@pytest.mark.parametrize("rows", [FP32, None])
def test_what_does_not_fit_as_factors(
    rows: torch.dtype | None, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Entries stay in their dtype, and so do their gradients."""
    x = Inputs(device, half, n=70, m=39, d=24, dv=16)
    bias = x.bias(image(x, *WIDE, rows))
    (spec,) = pack_for_training(bias, half=True).groups
    assert spec.columns == 0 and {"rel_h", "rel_w"} < set(spec.tensors)
    assert gradients(x, bias, of_backend(kernel))["axial.rel_h"].dtype == (rows or half)
    scale = torch.tensor([3.0, 8.0], device=device)
    check(x, bias, kernel, causal=True, cosine=True, scale=scale)


@pytest.mark.parametrize("heads", [(1,), (0, 1)])
def test_beside_factors_in_half_precision(
    heads: tuple[int, ...], half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """A small image, but factors take most columns of the kernel."""
    x = Inputs(device, half, n=33, m=47, d=8)
    small = image(x, 9, 11, FP32, heads=heads)
    gate = x.normal(2, len(heads), x.n)
    thin = dataclasses.replace(x.low_rank(240, split=0), row_scale=0.1 * x.normal(2, x.n))
    bias = x.bias(thin, dataclasses.replace(small, row_scale=gate))
    assert any("rel_h" in spec.tensors for spec in pack_for_training(bias, half=True).groups)
    mask = x.integers(4, 2, x.m) > 0
    check(x, bias, kernel, key_mask=mask)


@pytest.mark.parametrize("dtype", [FP32, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("programs", [1, 4])
def test_entries_that_the_batch_shares(
    programs: int,
    dtype: torch.dtype,
    kernel: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums over the batch, in each of the walks, however they are cut into splits."""
    monkeypatch.setattr(backward_launch, "ENOUGH_PROGRAMS", programs)
    x = Inputs(device, dtype, batch=(2, 3), heads=2, n=9, m=21, d=8)
    check(x, x.bias(image(x, 3, 280, heads=(1,))), kernel)
    check(x, x.bias(image(x, *WIDE, batch_h=(3,))), kernel)
    check(x, x.bias(image(x, *WIDE, batch_w=(2, 1)), x.key_bias()), kernel)


@pytest.mark.parametrize("dtype", [FP32, HALF], ids=["fp32", "fp16"])
def test_gates_of_half_precision(dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    """They are multiplied in fp32, as the formula has it."""
    x = Inputs(device, dtype, n=20, m=31)
    term = dataclasses.replace(image(x, *WIDE, HALF), row_scale=8 * x.normal(2, 1, x.n).half())
    check(x, x.bias(term), kernel)


def test_entries_that_hide_keys(kernel: str, device: torch.device) -> None:
    """Entries that fp16 does not hold: they get none of the gradient, and spoil no other."""
    x = Inputs(device, HALF, n=20, m=31)
    term = image(x, *WIDE, FP32)
    term.rel_h[:, 3, term.y[:9]] = float("-inf")
    term.rel_w[:, 4, term.x[:9]] = -1e30
    check(x, x.bias(term), kernel)


@pytest.mark.parametrize("wanted", ["rel_h", "rel_w"])
@pytest.mark.parametrize("dtype", [FP32, HALF], ids=["fp32", "fp16"])
def test_only_what_asks_gets_a_gradient(
    wanted: str, dtype: torch.dtype, kernel: str, device: torch.device, monkeypatch: Any
) -> None:
    x = Inputs(device, dtype, n=11, m=23)
    term = image(x, 140, 270)
    every = [gradients(x, x.bias(term), of_backend(kernel)) for _ in range(2)]
    assert all(torch.equal(every[0][name], every[1][name]) for name in every[0])
    leaf = getattr(term, wanted).clone().requires_grad_()
    alone = x.bias(dataclasses.replace(term, **{wanted: leaf}))
    out = flashbias_attention(x.q, x.k, x.v, alone, backend=kernel)
    start = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).half().to(out)
    with launches(monkeypatch) as names:
        (found,) = torch.autograd.grad(out, leaf, start)
    assert torch.equal(found, every[0][f"axial.{wanted}"])
    assert names == ["delta_kernel"] + ["query_gradients_kernel"] * (2 if wanted == "rel_h" else 3)


@pytest.mark.parametrize("dtype", [FP32, HALF], ids=["fp32", "fp16"])
def test_atomics_do_not_add_them(
    dtype: torch.dtype, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only entries that ask for no gradient can be beside those that atomics add."""
    x = Inputs(device, dtype, n=11, m=23)
    bias = x.bias(image(x, *WIDE))
    expected = gradients(x, bias, of_backend(kernel))
    with launches(monkeypatch) as names:
        found = gradients(x, bias, with_atomics(kernel))
    assert names == [*TWO_WALKS[:2], *TWO_WALKS[1:]]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out = flashbias_attention(*leaves, bias, backend=kernel, deterministic=False)
    start = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).half().to(out)
    with launches(monkeypatch) as names:
        frozen = torch.autograd.grad(out, leaves, start)
    assert WALK in names
    truth = gradients(x, bias, of_backend("eager"), torch.float64)
    plain = plain_gradients(x, bias, truth)
    for name, own in zip("qkv", frozen, strict=True):
        assert_parity(own, plain[name], truth[name])


@pytest.mark.parametrize("dtype", [FP32, HALF], ids=["fp32", "fp16"])
def test_auto_trains_on_the_kernels(
    dtype: torch.dtype, kernel: str, device: torch.device, recwarn: pytest.WarningsRecorder
) -> None:
    x = Inputs(device, dtype, n=11)
    bias = x.bias(image(x, *WIDE))
    assert unsupported(bias, half=dtype == HALF) is None
    auto, asked = (gradients(x, bias, of_backend(name)) for name in ("auto", kernel))
    assert all(torch.equal(auto[name], asked[name]) for name in auto)
    assert not [w for w in recwarn if issubclass(w.category, BackendFallbackWarning)]


@pytest.mark.parametrize("columns", [0, 64, 256])
@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_settings_leave_room_for_sums(d: int, columns: int) -> None:
    """Those of both axes, of dq and of factors take half of what a thread can have, or less."""
    settings = backward_settings(
        "queries", rows=4096, d=d, dv=d, columns=columns, half=True,
        added=frozenset({"rel_h"}), axial=300,
    )  # fmt: skip
    sums = settings.block_m * (2 * COORDINATES + d + columns) / (32 * settings.num_warps)
    assert sums <= 128
