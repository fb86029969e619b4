"""How fast this card does what attention consists of, one thing at a time.

Each is measured by a kernel that does little else: exponentials of numbers in registers, products
of tiles that lie on the chip or of large matrices, reads of a buffer that fits the second-level
cache, and reads or copies of one that does not, whichever is faster.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: programs per multiprocessor
PROGRAMS = 4
STEPS = 512
#: bytes that are read again and again
CACHED = 16 * 2**20
COPIED = 2 * 2**30
BLOCK_BYTES = 16 * 2**10
#: rows and columns of small and of large matrices
TILE, LARGE = 64, 8192


@dataclass(frozen=True)
class Rates:
    """Of one card.

    Attributes:
        exponentials: fp32 powers of two per second.
        products: bf16 floating-point operations per second, multiplications and additions.
        cached: bytes read from the second-level cache per second.
        memory: bytes read per second, or read and written by a copy.
    """

    exponentials: float
    products: float
    cached: float
    memory: float


@triton.jit
def exponentials_kernel(out, STEPS: tl.constexpr, SIZE: tl.constexpr):
    """Powers of two of powers of two: near 0.64 they stay what they are."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = at.to(tl.float32) * 1e-9
    for _ in range(STEPS):
        x = tl.exp2(-x)
    tl.store(out + at, x)


@triton.jit
def products_kernel(left, right, out, STEPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Sums of the same product, (ROWS, SIZE) = (ROWS, SIZE) (SIZE, SIZE), of tiles on the chip."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, SIZE)
    a = tl.load(left + rows[:, None] * SIZE + columns[None, :])
    b = tl.load(right + columns[:, None] * SIZE + columns[None, :])
    total = tl.zeros([ROWS, SIZE], tl.float32)
    for _ in range(STEPS):
        total = tl.dot(a, b, total)
    at = tl.program_id(0) * ROWS + rows
    tl.store(out + at[:, None] * SIZE + columns[None, :], total)


@triton.jit
def reads_kernel(numbers, out, SIZE, steps, BLOCK: tl.constexpr):
    """Exclusive or of blocks of int32 that lie apart; past the first-level cache."""
    near = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    blocks = SIZE // BLOCK
    for s in range(steps):
        block = (tl.program_id(0) + s * tl.num_programs(0)) % blocks
        found ^= tl.load(numbers + block * BLOCK + near, cache_modifier=".cg")
    tl.store(out + tl.program_id(0) * BLOCK + near, found)


def measure(device: torch.device) -> Rates:
    """Measure a card: about a second."""
    programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    large = torch.zeros(COPIED // 4, device=device, dtype=torch.int32)
    small, ones = (
        large[: CACHED // 4],
        torch.ones(LARGE, LARGE, device=device, dtype=torch.bfloat16),
    )
    once = COPIED // (programs * BLOCK_BYTES)  # blocks of each program, so that all are read once
    tiles = programs * STEPS * 2 * 2 * TILE * TILE * TILE
    return Rates(
        exponentials=_rate(lambda: exponentials(programs, device), programs * STEPS * 4096),
        products=max(
            _rate(lambda: products(ones, programs), tiles),
            _rate(lambda: ones @ ones, 2 * LARGE**3),
        ),
        cached=_rate(lambda: reads(small, programs, STEPS), programs * STEPS * BLOCK_BYTES),
        memory=max(
            _rate(lambda: reads(large, programs, once), programs * once * BLOCK_BYTES),
            _rate(lambda: large[: len(large) // 2].copy_(large[len(large) // 2 :]), COPIED),
        ),
    )


def exponentials(programs: int, device: torch.device) -> torch.Tensor:
    """4,096 numbers for each program, each raised `STEPS` times."""
    out = torch.empty(programs * 4096, device=device)
    exponentials_kernel[(programs,)](out, STEPS, 4096, num_warps=4)
    return out


def products(numbers: torch.Tensor, programs: int) -> torch.Tensor:
    """`STEPS` products of (128, 64) and (64, 64) for each program, of the first numbers, added."""
    out = torch.empty(programs * 2 * TILE, TILE, device=numbers.device)
    products_kernel[(programs,)](numbers, numbers, out, STEPS, 2 * TILE, TILE, num_warps=8)
    return out


def reads(numbers: torch.Tensor, programs: int, steps: int) -> torch.Tensor:
    """So many blocks of 16 KiB of int32 for each program, from the first one on again and again."""
    block = BLOCK_BYTES // 4
    out = torch.empty(programs * block, device=numbers.device, dtype=torch.int32)
    reads_kernel[(programs,)](numbers, out, numbers.numel(), steps, block, num_warps=8)
    return out


def _rate(call: Callable[[], object], count: int) -> float:
    """How many of `count` things that a call does are done in a second."""
    torch.cuda.synchronize()  # the other stream must not overtake what made the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        ms = triton.testing.do_bench_cudagraph(call, rep=50, return_mode="median")
    return count / (ms * 1e-3)
