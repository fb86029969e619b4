"""Edits of the forward kernel that were tried where it does not reach what was aimed at.

Each replaces text of the kernel by other text, so that what was tried can be read, and measured
again after the kernel has changed (`try_edits.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FORWARD, STEPS, LOOKUP = "triton_forward.py", "triton_steps.py", "triton_lookup.py"
PACKING, OPERATOR, LAUNCH = "packing.py", "operator.py", "launch.py"
#: no edit at all
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Edit:
    """One thing that was tried.

    Attributes:
        why: what was hoped for.
        changes: by file of `flashbias_convert/attention`, pairs of a text, which stands there once
            unless `everywhere`, and of what takes its place.
        shapes: names of `attention_shapes.SHAPES` that it was tried at.
        everywhere: texts may stand there more than once, and all are replaced.
    """

    why: str
    changes: Mapping[str, tuple[tuple[str, str], ...]]
    shapes: tuple[str, ...]
    everywhere: bool = False

    def apply(self, folder: Path) -> None:
        """Make the edit in a copy of `flashbias_convert/attention`.

        Raises:
            ValueError: the kernel has other text by now.
        """
        for name, pairs in self.changes.items():
            text = (folder / name).read_text()
            for old, new in pairs:
                found = text.count(old)
                if found == 0 or (found > 1 and not self.everywhere):
                    raise ValueError(f"{name} has {old!r} {found} times")
                text = text.replace(old, new)
            (folder / name).write_text(text)


_PROGRAMS = """    pid_m = pid % blocks
    g = (pid // blocks) % G
    b = pid // blocks // G
"""
_TILES = "for s in tl.range(lower, upper, BN):"
_SUMS = "                    total += tl.sum(p, 1)\n"
_ZEROS = "total = tl.zeros([BM], tl.float32)"
_WEIGHTS = "p = weights(x, top, to_exp2, TRAINING)"
_DENSE_WINDOWS = ("swinv2b-s3 dense cosine", "t5 dense", "N=577 D=64 dense")
_FACTORS = ("swinv2b-s3 R=32", "pangu R=64", "triangle R=32")
_TABLES = ("swinv2b-s3 table cosine", "t5 table", "beit-l 512 table")
_BY_DISTANCE = ("t5 table", "N=144 D=64 table", "N=512 D=64 table", "N=2048 D=64 table")
_COSINE = (
    "swinv2b-s3 table cosine", "swinv2b-s3 R=16 cosine", "swinv2b-s3 dense cosine",
    "swinv2b-s1 shift R=16 cosine",
)  # fmt: skip
_LONG = ("pde R=16", "non-causal R=16")

_LOOK = (
    "                        key_code = tl.load(codes_k_ptr + safe_k)\n"
    "                        entry = look_up(table_ptr, code[:, None] + key_code[None, :])\n"
)
_IMPORT = (
    "from .triton_lookup import look_up, look_up_pairs, rows_of_pairs\n",
    "from .triton_lookup import look_up, look_up_from, look_up_twos, look_up_pairs\n"
    "from .triton_lookup import rows_of_pairs\n",
)
_ROW_BASE = (
    "            code = rows_of_pairs(table_ptr, code)\n",
    """            code = rows_of_pairs(table_ptr, code)
        else:
            code = table_ptr.to(tl.int64) + 4 * code
""",
)
_FROM_ROW = (
    "@triton.jit\ndef look_up(table_ptr, index):\n",
    """ONE = tl.constexpr(
    "{ .reg .u64 at; cvt.u64.u32 at, $1; add.u64 at, at, $2; ld.global.nc.f32 $0, [at]; }"
)
TWO = tl.constexpr(
    "{ .reg .u64 at; cvt.u64.u32 at, $2; add.u64 at, at, $3;"
    " ld.global.nc.f32 $0, [at]; ld.global.nc.f32 $1, [at+-4]; }"
)


@triton.jit
def look_up_from(base, index):
    return tl.inline_asm_elementwise(
        ONE, "=f,r,l", [4 * index, base], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def look_up_twos(base, index, BM: tl.constexpr, BN: tl.constexpr):
    low, high = tl.inline_asm_elementwise(
        TWO, "=f,=f,r,l", [4 * index, base], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )
    return tl.reshape(tl.join(low, high), [BM, BN])


@triton.jit
def look_up(table_ptr, index):
""",
)
_BY_TWOS = """                        even = s + 2 * tl.arange(0, BN // 2)
                        even = tl.minimum(even, M - 2) if PASS == EDGES else even
                        key_code = tl.load(codes_k_ptr + even)
                        entry = look_up_twos(code[:, None], key_code[None, :], BM, BN)
"""
_DIVIDED = (
    "    if term.by_distance:  # the kernel for Hopper reads these, as they are\n"
    "        return table, {}\n",
    "    if term.by_distance and scale is not None:\n"
    '        return table / scale, {"divided": True}\n',
)
_ONE_BY_ONE = (
    ("    if term.pairs:\n", "    if False:\n"),
    ('{"pairs": term.pairs, ', '{"pairs": False, '),
)
_EXPONENT = {
    FORWARD: (("IN_QUERIES: tl.constexpr = COSINE and", "IN_QUERIES: tl.constexpr = False and"),),
    OPERATOR: (("unit = COSINE_UNIT if args.cosine else number", "unit = number"),),
}
_SHIFTED = ("swinv2b-s1 shift R=16 cosine",)
_COMPARED = "if ids_ptr is not None:"


def _one_region(told: str) -> dict[str, tuple[tuple[str, str], ...]]:
    """A third pass over the tiles, for windows of more regions; `told` says which are not."""
    return {FORWARD: (
        ("    if parts_ptr is not None:\n        # whole blocks of the keys",
         f"    is_plain = True\n    if ids_ptr is not None:{told}"
         "    if parts_ptr is not None:\n        # whole blocks of the keys"),
        ("in tl.static_range(3 if SCANNED else 2):",
         "in tl.static_range(3 if ids_ptr is not None else 2):"),
        ("            if SCANNED and PASS != EDGES:\n"
         "                upper = tl.where(is_range == (PASS == INSIDE), quick_end, begin)\n",
         "            if ids_ptr is not None and PASS != EDGES:\n"
         "                upper = tl.where(is_plain == (PASS == INSIDE), quick_end, begin)\n"),
        *((f"{' ' * deep}{_COMPARED}\n{' ' * deep}    {next_}",
           f"{' ' * deep}if ids_ptr is not None and PASS != INSIDE:\n{' ' * deep}    {next_}")
          for deep, next_ in ((16, "if REGION_PAIRS:"), (20, "x = tl.fma"), (20, "level = top"))),
    )}  # fmt: skip


def _exponentials(kind: str) -> tuple[str, str]:
    half = "bfloat16" if kind == "bf16x2" else "float16"
    ftz = ".ftz" if kind == "bf16x2" else ""
    return _WEIGHTS, (
        "p = tl.inline_asm_elementwise("
        f'"ex2.approx{ftz}.{kind} $0, $1;", "=r,r", '
        f"[(x * to_exp2 - (top * to_exp2)[:, None]).to(tl.{half})], "
        f"dtype=tl.{half}, is_pure=True, pack=2).to(tl.float32)"
    )


EDITS: dict[str, Edit] = {
    "entries side by side": Edit(
        "programs that run together share the bias of a head and a block of queries",
        {FORWARD: ((_PROGRAMS, """    beside = tl.num_programs(0) // blocks // G
    b = pid % beside
    pid_m = (pid // beside) % blocks
    g = pid // beside // blocks
"""),)},
        (*_DENSE_WINDOWS, *_FACTORS, *_TABLES),
    ),
    "heads one by one": Edit(
        "programs that run together share what belongs to a head, and keys of an entry",
        {FORWARD: ((_PROGRAMS, """    beside = tl.num_programs(0) // blocks // G
    pid_m = pid % blocks
    b = (pid // blocks) % beside
    g = pid // blocks // beside
"""),)},
        (*_DENSE_WINDOWS, *_FACTORS, *_TABLES),
    ),
    "factors first": Edit(
        "the product of factors, which is read from the cache, hides the wait for keys",
        {STEPS: (
            ('    x = tl.dot(q, k, input_precision="ieee")\n', ""),
            ("        x = tl.dot(phi_q, phi_k, x, input_precision=",
             "        x = tl.dot(phi_q, phi_k, input_precision="),
            ("    return x\n\n\n@triton.jit\ndef weights(",
             '    return tl.dot(q, k, x, input_precision="ieee")\n\n\n@triton.jit\ndef weights('),
            ("    if NATURAL:\n        x = x * size\n", ""),
        )},
        _FACTORS,
    ),
    "factors stay in the cache": Edit(
        "keys and values are read once, and need not take the place of factors",
        {STEPS: (
            ("phi_k = tile(phi_k_ptrs + far * phi_k_strides[4], in_keys, None, EDGE, False)",
             "phi_k = tl.load(phi_k_ptrs + far * phi_k_strides[4], mask=in_keys, other=0.0,"
             ' eviction_policy="evict_last")'),
            ("        return tl.load(ptrs)\n",
             '        return tl.load(ptrs, eviction_policy="evict_first")\n'),
        )},
        _FACTORS,
    ),
    "two steps a turn": Edit(
        "a step's exponentials run beside the next one's products",
        {FORWARD: ((_TILES, "for s in tl.range(lower, upper, BN, loop_unroll_factor=2):"),)},
        (*_DENSE_WINDOWS, *_FACTORS, *_TABLES, *_LONG),
    ),
    "sums by the tensor cores": Edit(
        "a product with ones adds weights up, an addition a score less",
        {FORWARD: (
            (_ZEROS, f"{_ZEROS}; sums = tl.zeros([BM, 16], tl.float32)"),
            (_SUMS, "                    sums = tl.dot(p.to(v_ptr.dtype.element_ty),"
             " tl.full([BN, 16], 1.0, v_ptr.dtype.element_ty), sums)\n"),
            ("        again = False\n",
             "        total += tl.sum(sums, 1) / 16\n        again = False\n"),
        )},
        ("swinv2b-s1 shift R=16 cosine", "swinv2b-s3 R=32", *_DENSE_WINDOWS, *_TABLES, *_LONG),
        everywhere=True,
    ),
    "exponentials of bf16, by twos": Edit(
        "one instruction for two exponentials; levels are coarse",
        {FORWARD: (_exponentials("bf16x2"),)},
        _LONG,
    ),
    "exponentials of fp16, by twos": Edit(
        "one instruction for two exponentials; levels are coarse",
        {FORWARD: (_exponentials("f16x2"),)},
        _LONG,
    ),
    "an address for each row": Edit(
        "codes of queries are added to the address once, not for each score",
        {LOOKUP: (_FROM_ROW,), FORWARD: (_IMPORT, _ROW_BASE, (
            _LOOK,
            "                        key_code = tl.load(codes_k_ptr + safe_k)\n"
            "                        entry = look_up_from(code[:, None], key_code[None, :])\n",
        ))},
        (*_BY_DISTANCE, "beit-l 512 table"),
    ),
    "keys by twos": Edit(
        "an address for two keys, whose codes are one apart: of tables by distance, too",
        {LOOKUP: (_FROM_ROW,), FORWARD: (_IMPORT, _ROW_BASE, (_LOOK, _BY_TWOS))},
        _BY_DISTANCE,
    ),
    "tables divided by the scale": Edit(
        "entries in the units of scores begin their sums: of tables by distance, too",
        {PACKING: (_DIVIDED,)},
        _BY_DISTANCE,
    ),
    "keys by twos, tables divided": Edit(
        "both",
        {LOOKUP: (_FROM_ROW,), PACKING: (_DIVIDED,),
         FORWARD: (_IMPORT, _ROW_BASE, (_LOOK, _BY_TWOS))},
        _BY_DISTANCE,
    ),
    "entries one by one": Edit(
        "as it was: a read for each score, of a table that is half as large",
        {PACKING: _ONE_BY_ONE},
        _TABLES[:1],
    ),
    "the scale in the exponential": Edit(
        "as it was: queries of length one, and a product with the scale for each score",
        _EXPONENT,
        _COSINE,
    ),
    "entries one by one, the scale in the exponential": Edit(
        "as it was: both",
        {PACKING: _ONE_BY_ONE, **_EXPONENT},
        _TABLES[:1],
    ),
    "regions one by one": Edit(
        "as it was: a comparison for each score, not for two keys of one region",
        {LAUNCH: (('"REGION_PAIRS": spec.region_pairs', '"REGION_PAIRS": False'),)},
        _SHIFTED,
    ),
    "windows of one region, looked for": Edit(
        "most windows of a shifted map are one region, whose pairs need not be compared",
        _one_region("""
        of_keys = tl.load(key_ids_ptr)
        found = tl.zeros([256], tl.int32)
        for s in range(0, end, 256):
            where = tl.minimum(s + tl.arange(0, 256), end - 1)
            found |= (tl.load(key_ids_ptr + where * key_ids_strides[3]) != of_keys).to(tl.int32)
        is_plain = (tl.max(found, 0) == 0) & (tl.max((region != of_keys).to(tl.int32), 0) == 0)
"""),
        _SHIFTED,
    ),
    "windows of one region, known": Edit(
        "the same, with one comparison that is right for shifted windows alone",
        _one_region("""
        is_plain = tl.load(key_ids_ptr) == tl.load(key_ids_ptr + (M - 1) * key_ids_strides[3])
"""),
        _SHIFTED,
    ),
}  # fmt: skip
