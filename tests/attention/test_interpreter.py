"""What Triton's interpreter gets right and wrong, so that its faults are not taken for ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

N, TILE = 49, 64


@triton.jit
def row_sums_kernel(x_ptr: Any, out_ptr: Any, n: Any, SIZE: tl.constexpr) -> None:
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (rows < n) & (columns < n)
    x = tl.load(x_ptr + rows * n + columns, mask=inside, other=0.0)
    tl.store(out_ptr + tl.arange(0, SIZE), tl.sum(x, 1))


@triton.jit
def double_kernel(x_ptr: Any, out_ptr: Any, SIZE: tl.constexpr) -> None:
    where = tl.arange(0, SIZE)
    x = tl.load(x_ptr + where)
    tl.store(out_ptr + where, x + x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masked_loads_fill_with_zeros(dtype: torch.dtype) -> None:
    """N = 49 in a tile of 64; NaN lies behind the tensor, and small integers sum exactly."""
    storage = torch.full((TILE * TILE,), float("nan"), dtype=dtype)
    x = storage[: N * N].view(N, N)
    x.copy_(torch.randint(-8, 8, (N, N), generator=torch.Generator().manual_seed(0)))
    sums = torch.full((TILE,), float("nan"), dtype=dtype)
    row_sums_kernel[(1,)](x, sums, N, TILE)
    assert torch.equal(sums[:N], x.sum(1))
    assert (sums[N:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_arithmetic_is_right_in_the_dtypes_that_tests_use(dtype: torch.dtype) -> None:
    x = torch.arange(16).to(dtype)
    out = torch.zeros_like(x)
    double_kernel[(1,)](x, out, 16)
    assert torch.equal(out, 2 * x)


def test_bf16_is_taken_for_raw_bits() -> None:
    """The reason for skipping bf16. Should this fail, the `dtype` fixture can let bf16 through."""
    x = torch.arange(1, 17).bfloat16()
    out = torch.zeros_like(x)
    double_kernel[(1,)](x, out, 16)
    bits = 2 * x.view(torch.uint16).to(torch.int32) % 2**16
    assert torch.equal(out.view(torch.uint16).to(torch.int32), bits)
    assert not torch.equal(out, 2 * x)


def test_the_dtype_fixture_lets_no_bf16_through(dtype: torch.dtype) -> None:
    assert dtype in (torch.float32, torch.float16)
