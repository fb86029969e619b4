"""Launch settings: a fixed function of the shape, so that the same call gives the same bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchSettings:
    """How one kernel is launched.

    Attributes:
        block_m: queries per program.
        block_n: keys per step.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def launch_settings(
    *,
    n: int,
    d: int,
    dv: int,
    columns: int,
    half: bool,
    terms: Collection[str],
) -> LaunchSettings:
    """Settings for one launch, read off `scripts/results/tuning.csv`.

    Args:
        n: queries.
        d, dv: head sizes, padded to powers of two.
        columns: padded number of factor columns.
        half: fp16 or bf16 inputs; fp32 products run on the plain arithmetic units.
        terms: names of the tensors that the kernel reads besides q, k and v.
    """
    width = max(d, dv)
    if not half:
        return LaunchSettings(32 if width <= 64 else 16, 32, 4, 2)
    if n <= 16:
        return LaunchSettings(16, 64, 4, 2)
    if width <= 32:
        narrow = columns > 32 or "dense" in terms
        return LaunchSettings(64, 32 if narrow else 64, 4, 3)
    if width <= 64 and columns <= 64:
        return LaunchSettings(128 if n > 64 else 64, 64, 4, 3)
    if width <= 128 and columns <= 64:
        return LaunchSettings(64, 64, 4, 2)
    return LaunchSettings(64, 32, 4, 2)


def backward_settings(kernel: str, *, d: int, dv: int, columns: int, half: bool) -> LaunchSettings:
    """Settings for one launch of a backward kernel, chosen so that common sizes fit registers.

    Args:
        kernel: "queries" (a block of queries walks the keys), "keys" (the other way round) or
            "pairs" (one tile walks the batch).
        d, dv: head sizes, padded to powers of two.
        columns: padded number of factor columns.
        half: fp16 or bf16 inputs.
    """
    width = max(d, dv)
    if not half:
        return LaunchSettings(16 if width > 64 else 32, 16 if width > 64 else 32, 4, 1)
    if width > 128 or columns > 64:
        return LaunchSettings(32, 32, 4, 1)
    if width <= 64 and columns <= 32:
        return LaunchSettings(64, 64, 4, 2)
    # 64 rows of what is accumulated are the fewest of a wide tensor-core instruction
    return LaunchSettings(32, 64, 4, 2) if kernel == "keys" else LaunchSettings(64, 32, 4, 2)
