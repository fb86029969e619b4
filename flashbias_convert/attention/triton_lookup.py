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
