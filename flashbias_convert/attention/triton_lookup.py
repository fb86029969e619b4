"""Reading a table at one index for each score, where the score is.

A load of a tile of pointers would be laid out for memory, and its result moved through shared
memory to where the scores are, at the cost of a dozen barriers a tile. Instructions given as text
are laid out like the scores.
"""

# mypy: ignore-errors
from __future__ import annotations

import os

import triton
import triton.language as tl

#: The interpreter knows no instructions.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
READ = tl.constexpr("{ .reg .u64 at; mad.wide.s32 at, $1, 4, $2; ld.global.nc.f32 $0, [at]; }")
READ_PAIR = tl.constexpr(
    "{ .reg .u64 at; cvt.u64.u32 at, $2; add.u64 at, at, $3; ld.global.nc.v2.f32 {$0, $1}, [at]; }"
)
#: bytes of two entries
PAIR_BYTES = tl.constexpr(8)


@triton.jit
def look_up(table_ptr, index):
    """fp32 entries of a table at int32 indices of any shape."""
    if INTERPRETED:
        return tl.load(table_ptr + index)
    else:
        base = table_ptr.to(tl.int64)
        return tl.inline_asm_elementwise(
            READ, "=f,r,l", [index, base], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def rows_of_pairs(table_ptr, codes):
    """Where the pairs of each query begin, for `look_up_pairs`; int32 codes of shape (BM,)."""
    if INTERPRETED:
        return table_ptr + 2 * codes
    else:
        return table_ptr.to(tl.int64) + PAIR_BYTES * codes.to(tl.int64)


@triton.jit
def look_up_pairs(rows, codes, BM: tl.constexpr, BN: tl.constexpr):
    """fp32 entries (BM, BN) of a table of pairs: of two keys side by side from each.

    Args:
        rows: made by `rows_of_pairs`, (BM,).
        codes: int32 (BN / 2,), not negative: of the first key of each two.
    """
    if INTERPRETED:
        first = rows[:, None] + 2 * codes[None, :]
        even, odd = tl.load(first), tl.load(first + 1)
    else:
        # the half that belongs to a query is added up once, not for each pair
        offset = (PAIR_BYTES * codes)[None, :]
        even, odd = tl.inline_asm_elementwise(
            READ_PAIR, "=f,=f,r,l", [offset, rows[:, None]],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.reshape(tl.join(even, odd), [BM, BN])
