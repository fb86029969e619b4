"""Launch settings: a fixed function of the shape, so that the same call gives the same bits."""

from __future__ import annotations

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
    *, n: int, m: int, d: int, dv: int, columns: int, half: bool, elementwise: bool
) -> LaunchSettings:
    """Settings for one launch.

    Args:
        n, m: queries and keys.
        d, dv: head sizes, padded to powers of two.
        columns: padded number of factor columns.
        half: fp16 or bf16 inputs; fp32 products run on the plain arithmetic units.
        elementwise: whether a table, regions, positions or a dense bias are added.
    """
    width = max(d, dv)
    if not half:
        return LaunchSettings(32 if width <= 64 else 16, 32, 4, 2)
    if n <= 16:
        return LaunchSettings(16, 64, 4, 2)
    if width <= 64 and columns <= 64:
        block_m = 128 if n >= 128 else 64
        return LaunchSettings(block_m, 64, 4 if block_m == 64 or width <= 32 else 8, 3)
    return LaunchSettings(64, 64 if width <= 128 and columns <= 128 else 32, 4, 2)
