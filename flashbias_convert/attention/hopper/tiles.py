"""What one warpgroup does with a tile of scores, in Gluon: layouts, products, masks, weights.

A math warpgroup has 64 rows of queries. Scores, weights and sums stay in its registers, in the
layout in which the tensor cores leave them.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from . import forms, rules

#: rows of a warpgroup
ROWS = gl.constexpr(rules.ROWS)
ALIBI, KEY_BIAS, RISING = (
    gl.constexpr(kind) for kind in (forms.ALIBI, forms.KEY_BIAS, forms.RISING)
)
#: where a form's code has which number; Gluon lets functions read nothing but constants
FIELDS = gl.constexpr(forms.FIELDS)


@gluon.constexpr_function
def get(form, name):
    """A number of the form's code, as `forms.read` reads it."""
    at = 0
    for field, bits, unit in FIELDS.value:
        if field == str(getattr(name, "value", name)):
            return (int(getattr(form, "value", form)) >> at & (1 << bits) - 1) * unit
        at += bits
    raise KeyError(name)


@gluon.constexpr_function
def product_layout(n):
    """Of a product (64, n) as the tensor cores leave it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def operand_layout(n):
    """Of a left factor in registers, of a product with n columns."""
    return gl.DotOperandLayout(0, product_layout(n), 2)


@gluon.jit
def exp2(x):
    """2^x to about two units in the last place, in one instruction; less than 2^-126 is zero."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """To bf16 or fp16 in pairs, which the compiler would pack once more if it made them."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def as_operand(p, dtype: gl.constexpr, D: gl.constexpr):
    """Weights as the left factor of a product with values."""
    return gl.convert_layout(narrow(p, dtype), operand_layout(D))


@gluon.jit
def scores(q, pq, k, pk, n: gl.constexpr, FORM: gl.constexpr):
    """Ask for q k^T + phi_q phi_k^T, (64, n), of the first n keys of a tile."""
    D: gl.constexpr = get(FORM, "HEAD")
    R: gl.constexpr = get(FORM, "COLUMNS")
    BN: gl.constexpr = get(FORM, "KEYS")
    s = gl.zeros([ROWS, n], gl.float32, product_layout(n))
    k = k.reshape([BN, D])
    if n < BN:
        k = k.slice(0, n)
    s = warpgroup_mma(q, k.permute([1, 0]), s, use_acc=False, is_async=True)
    if R > 0:
        pk = pk.reshape([BN, R])
        if n < BN:
            pk = pk.slice(0, n)
        s = warpgroup_mma(pq, pk.permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def weighted(p, v, acc, n: gl.constexpr, FORM: gl.constexpr):
    """Ask for acc + p v, (64, D), of the first n keys of a tile."""
    v = v.reshape([get(FORM, "KEYS"), get(FORM, "HEAD")])
    if n < get(FORM, "KEYS"):
        v = v.slice(0, n)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def hide(s, row, key, N, n: gl.constexpr, FORM: gl.constexpr):
    """Minus infinity where a key comes after its query, or a sequence has ended.

    Args:
        s: (64, n), of queries from `row` on and keys from `key` on.
        N: length of the sequence.
    """
    columns = gl.arange(0, n, gl.SliceLayout(0, product_layout(n)))
    if get(FORM, "CAUSAL"):
        # a row past the end is not stored, and one before it sees no key past it
        rows = (row - key) + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(n)))
        return gl.where(columns[None, :] <= rows[:, None], s, float("-inf"))
    else:
        return gl.where(columns[None, :] < N - key, s, float("-inf"))


@gluon.constexpr_function
def _pack(n):
    return min(16, int(getattr(n, "value", n)) // 2)


@gluon.constexpr_function
def _reads(n, rising):
    """Instructions that read what a thread's next scores need of a table by distance.

    In the layout of scores a thread has columns j, j + 1 of rows i, i + 8, then the same of columns
    j + 8, j + 9, and so on, so that many distances are the same. The first one's address is given.
    """
    n, sign = int(getattr(n, "value", n)), 1 if getattr(rising, "value", rising) else -1
    count = min(16, n // 2)
    known, lines = {}, []
    for m in range(count):
        row, column = 8 * (m >> 1 & 1), 8 * (m >> 2) + (m & 1)
        place = 4 * sign * (column - row)
        if place in known:
            lines.append(f"mov.f32 ${m}, ${known[place]};")
        else:
            known[place] = m
            lines.append(f"ld.global.nc.f32 ${m}, [${count} + {place}];")
    return " ".join(lines)


@gluon.constexpr_function
def _operands(n):
    count = min(16, int(getattr(n, "value", n)) // 2)
    return ",".join(["=&f"] * count + ["l"] * count)


@gluon.jit
def by_distance(table, row, key, n: gl.constexpr, RISING: gl.constexpr):
    """Entries of a table at plus or minus (key - query), (64, n); `table` is where zero is."""
    layout: gl.constexpr = product_layout(n)
    i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    j = gl.arange(0, n, gl.SliceLayout(0, layout)).to(gl.int64) * 4
    if RISING:
        where = (table + (key - row) - i)[:, None].to(gl.int64) + j[None, :]
    else:
        where = (table + (row - key) + i)[:, None].to(gl.int64) - j[None, :]
    return gl.inline_asm_elementwise(
        _reads(n, RISING), _operands(n), [where], dtype=gl.float32, is_pure=True, pack=_pack(n)
    )


@gluon.jit
def before_scores(extra, row, key, n: gl.constexpr, FORM: gl.constexpr):
    """What can be read of a tile's bias while its scores are computed.

    Returns:
        ALiBi's slope times keys counted from the tile's first one, (n,), or entries of a table by
        distance, (64, n); anything where there is nothing to read.
    """
    BIAS: gl.constexpr = get(FORM, "BIAS")
    slope, table = extra
    columns = gl.arange(0, n, gl.SliceLayout(0, product_layout(n)))
    if BIAS == ALIBI:
        found = slope * columns.to(gl.float32)
    elif BIAS >= RISING:
        found = by_distance(table, row, key, n, BIAS == RISING)
    else:
        found = columns
    return found


@gluon.jit
def add_bias(s, found, values, scale, n: gl.constexpr, FORM: gl.constexpr):
    """scale s + bias, but for what is constant along a row; s alone if there is none.

    Args:
        s: scores (64, n) in units of the scale.
        found: of `before_scores`.
        values: a tile of a bias per key in shared memory, or anything.
    """
    BN: gl.constexpr = get(FORM, "KEYS")
    BIAS: gl.constexpr = get(FORM, "BIAS")
    if BIAS == ALIBI:
        s = gl.fma(s, scale, found[None, :])
    elif BIAS == KEY_BIAS:
        values = values.reshape([BN])
        if n < BN:
            values = values.slice(0, n)
        s = gl.fma(s, scale, values.load(gl.SliceLayout(0, product_layout(n)))[None, :])
    elif BIAS >= RISING:
        s = gl.fma(s, scale, found)
    return s


@gluon.jit
def row_shift(slope, row, key, D: gl.constexpr):
    """ALiBi's slope * (the tile's first key - query), which `add_bias` leaves out, (64,)."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(D)))
    return slope * (key - row - i).to(gl.float32)


@gluon.jit
def weights(
    y, level, shift, to_exp2, n: gl.constexpr, FIRST: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """Softmax of a tile in units of the level of each row.

    Args:
        y: (64, n) of `add_bias`.
        level: largest ones so far, (64,).
        shift: ALiBi's `row_shift`, or anything.
        to_exp2: turns them into exponents of two.
        FIRST: there are none so far.

    Returns:
        New levels, weights in fp32, their sums, and what older weights shrink by.
    """
    D: gl.constexpr = get(FORM, "HEAD")
    QUICK: gl.constexpr = get(FORM, "QUICK")
    MOVES: gl.constexpr = get(FORM, "BIAS") == ALIBI
    rows: gl.constexpr = gl.SliceLayout(1, product_layout(D))
    near: gl.constexpr = gl.SliceLayout(1, product_layout(n))
    top = level
    if FIRST or not QUICK:
        top = gl.convert_layout(gl.max(y, 1), rows, assert_trivial=True)
        if MOVES:
            top = top + shift
        if not FIRST:
            top = gl.maximum(level, top)
        if QUICK:
            # with a lower level usual scores would overflow
            top = gl.maximum(top, -24.0 / to_exp2)
    # where nothing is visible so far minus infinity would be taken from itself
    safe = top
    if not QUICK:
        safe = gl.where(top == float("-inf"), 0.0, top)
    shrink = level
    if not (FIRST or QUICK):
        shrink = exp2((level - safe) * to_exp2)
    base = safe
    if MOVES:
        base = safe - shift
    base = gl.convert_layout(base * to_exp2, near, assert_trivial=True)
    p = exp2(y * to_exp2 - base[:, None])
    total = gl.convert_layout(gl.sum(p, 1), rows, assert_trivial=True)
    return top, p, total, shrink
