"""How fast this card does what attention consists of, one thing at a time.

Each is measured by a kernel that does little else: exponentials of numbers in registers, products
of tiles that lie on the chip, reads of a buffer that fits the second-level cache, and copies of one
that does not.
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
TILE = 64


@dataclass(frozen=True)
class Rates:
    """Of one card.

    Attributes:
        exponentials: fp32 powers of two per second.
        products: bf16 floating-point operations per second, multiplications and additions.
        cached: bytes read from the second-level cache per second.
        memory: bytes read or written per second, a copy counting twice.
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
def reads_kernel(numbers, out, SIZE, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Exclusive or of blocks of int32 that lie apart; past the first-level cache."""
    near = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    blocks = SIZE // BLOCK
    for s in range(STEPS):
        block = (tl.program_id(0) + s * tl.num_programs(0)) % blocks
        found ^= tl.load(numbers + block * BLOCK + near, cache_modifier=".cg")
    tl.store(out + tl.program_id(0) * BLOCK + near, found)


def measure(device: torch.device) -> Rates:
    """Measure a card: about a second."""
    programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    return Rates(
        exponentials=_rate(lambda: exponentials(programs, device), programs * STEPS * 4096),
        products=_rate(
            lambda: products(programs, device), programs * STEPS * 2 * 2 * TILE * TILE * TILE
        ),
        cached=_rate(lambda: reads(programs, device), programs * STEPS * 4096 * 4),
        memory=_rate(_copy(device), 2 * COPIED),
    )


def exponentials(programs: int, device: torch.device) -> torch.Tensor:
    """4,096 numbers for each program, each raised `STEPS` times."""
    out = torch.empty(programs * 4096, device=device)
    exponentials_kernel[(programs,)](out, STEPS, 4096, num_warps=4)
    return out


def products(programs: int, device: torch.device) -> torch.Tensor:
    """`STEPS` products of (128, 64) and (64, 64) for each program, added up."""
    ones = torch.ones(2 * TILE, TILE, device=device, dtype=torch.bfloat16)
    out = torch.empty(programs * 2 * TILE, TILE, device=device)
    products_kernel[(programs,)](ones, ones, out, STEPS, 2 * TILE, TILE, num_warps=8)
    return out


def reads(programs: int, device: torch.device) -> torch.Tensor:
    """`STEPS` blocks of 16 KiB for each program."""
    numbers = torch.ones(CACHED // 4, device=device, dtype=torch.int32)
    out = torch.empty(programs * 4096, device=device, dtype=torch.int32)
    reads_kernel[(programs,)](numbers, out, numbers.numel(), STEPS, 4096, num_warps=8)
    return out


def _copy(device: torch.device) -> Callable[[], torch.Tensor]:
    source = torch.empty(COPIED, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _rate(call: Callable[[], object], count: int) -> float:
    """How many of `count` things that a call does are done in a second."""
    torch.cuda.synchronize()  # the other stream must not overtake what made the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        ms = triton.testing.do_bench_cudagraph(call, rep=50, return_mode="median")
    return count / (ms * 1e-3)
