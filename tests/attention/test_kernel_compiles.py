"""The kernels compile for sm_90 at awkward sizes, without a card.

Triton's interpreter lets pass what the compiler refuses, such as a matrix product over fewer than
16 columns, and says nothing of shared memory or registers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert import Dense, ScoreBias
from flashbias_convert.attention import launch
from flashbias_convert.attention.parts import MOST_PARTS
from flashbias_convert.attention.tuning import LaunchSettings
from flashbias_convert.terms import TERM_KINDS
from flashbias_convert.window_map import WindowMap

from .cases import Inputs
from .conftest import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("Triton's interpreter does not compile", allow_module_level=True)

from .ahead_of_time import (  # noqa: E402
    HOPPER_SHARED_BYTES,
    NVDISASM,
    Compiled,
    compile_attention,
    compile_factors,
    compile_normalize_rows,
    compile_projection,
)

CPU = torch.device("cpu")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

Terms = Callable[[Inputs], Sequence[object]]


@dataclass(frozen=True)
class Variant:
    """One call to compile for.

    Attributes:
        dtype: of q, k and v.
        n, d: queries and head size.
        terms: builds the terms of the bias.
        sizes: other sizes, see `Inputs`.
        options: arguments of the call; `masked` stands for a key mask, `placed` for a start per
            batch entry, `head_scales` for a scale per head, `gated` for a gate of the output.
    """

    dtype: torch.dtype
    n: int
    d: int
    terms: Terms = lambda x: ()
    sizes: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def inputs(self) -> Inputs:
        return Inputs(CPU, self.dtype, n=self.n, d=self.d, **{"heads": 3, **self.sizes})

    def compile(self) -> list[Compiled]:
        x = self.inputs()
        call: dict[str, Any] = {o: True for o in self.options if o in ("causal", "cosine")}
        if "masked" in self.options:
            call["key_mask"] = torch.ones(*x.q.shape[:-3], x.m, dtype=torch.bool)
        if "placed" in self.options:
            call["query_start"] = torch.zeros(x.q.shape[:-3], dtype=torch.int64)
        if "head_scales" in self.options:
            call["scale"] = torch.ones(x.heads)
        if "gated" in self.options:
            call["gate"] = torch.ones_like(x.q)
        return compile_attention(x.q, x.k, x.v, self.bias(x), **call)

    def bias(self, x: Inputs) -> ScoreBias | None:
        terms = self.terms(x)
        return x.bias(*terms) if terms else None


def every_kind(x: Inputs) -> Sequence[object]:
    thin = (x.low_rank(), x.key_bias(), x.alibi(), x.regions(), x.diagonal())
    return (*thin, x.table(), x.lookup(), x.axial(), x.dense())


def half_dense(x: Inputs) -> Sequence[object]:
    """A matrix in the dtype of the inputs."""
    return [Dense(bias=x.normal(x.heads, x.n, x.m).to(x.dtype))]


def other_terms_for_each_head(x: Inputs) -> Sequence[object]:
    dense = Dense(bias=x.normal(1, x.n, x.m), heads=(2,))
    return x.low_rank(17, heads=(0,), split=0), x.low_rank(2, heads=(1,)), dense, x.regions()


VARIANTS = {
    "fp16-decode-alibi": Variant(
        FP16, 1, 8, lambda x: [x.alibi()], {"m": 239}, ("causal", "masked", "placed")
    ),
    "bf16-decode-every-kind": Variant(
        BF16, 1, 40, every_kind, {"m": 197, "batch": (2, 3)}, ("causal",)
    ),
    "bf16-window-rank1-regions": Variant(
        BF16, 49, 24, lambda x: [x.low_rank(1), x.regions((2,))], {}, ("cosine", "head_scales")
    ),
    "bf16-triangle-gated": Variant(BF16, 77, 32, half_dense, {}, ("masked", "gated")),
    "fp16-key_bias-rows": Variant(FP16, 63, 30, lambda x: [x.rows(x.key_bias())], {}, ("masked",)),
    "bf16-relative_table": Variant(BF16, 113, 40, lambda x: [x.table()], {}, ("causal",)),
    "bf16-pairs": Variant(BF16, 576, 32, lambda x: [x.pairs(24)], {}, ("cosine", "head_scales")),
    "fp16-pairs-rows": Variant(FP16, 144, 64, lambda x: [x.rows(x.pairs(12))], {}, ("masked",)),
    "fp16-rank17-unsplit": Variant(FP16, 144, 72, lambda x: [x.low_rank(17, split=0)]),
    "bf16-dense-rows": Variant(BF16, 197, 80, lambda x: [x.rows(x.dense())], {}, ("masked",)),
    "fp16-rank7-key_bias": Variant(FP16, 239, 96, lambda x: [x.low_rank(7), x.key_bias()]),
    "bf16-rank56-unsplit-regions": Variant(
        BF16, 576, 8, lambda x: [x.low_rank(56, split=0), x.regions()], {}, ("cosine",)
    ),
    "fp16-rank56-split": Variant(FP16, 576, 24, lambda x: [x.low_rank(56)]),
    "fp16-every-kind": Variant(FP16, 49, 80, every_kind, {}, ("cosine",)),
    "bf16-heads-differ": Variant(BF16, 144, 24, other_terms_for_each_head, {}, ("causal",)),
    "bf16-distance": Variant(
        BF16, 63, 72, lambda x: [x.low_rank(3), x.rows(x.alibi(symmetric=True))]
    ),
    "bf16-grouped-heads": Variant(
        BF16, 239, 30, sizes={"kv_heads": 1, "dv": 80}, options=("causal", "masked")
    ),
    "fp16-lookup-rows": Variant(FP16, 239, 40, lambda x: [x.rows(x.lookup())], {}, ("masked",)),
    "bf16-axial": Variant(BF16, 197, 80, lambda x: [x.axial(), x.rows(x.diagonal())]),
    "fp16-largest-head": Variant(
        FP16, 113, 256, lambda x: [x.low_rank(56), x.dense()], {}, ("causal",)
    ),
    "fp32-rank2-key_bias-gated": Variant(
        FP32, 113, 30, lambda x: [x.low_rank(2), x.key_bias()], {}, ("causal", "gated")
    ),
    "fp32-relative_table-rows": Variant(
        FP32, 197, 8, lambda x: [x.rows(x.table())], {}, ("cosine", "masked")
    ),
    "fp32-heads-differ": Variant(FP32, 49, 24, other_terms_for_each_head),
    "fp32-largest-head": Variant(FP32, 1, 256, lambda x: [x.low_rank(56)], {"m": 144}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_compiles(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    compiled = [c for c in variant.compile() if c.name == "attention_kernel"]
    assert compiled
    for each in compiled:
        assert each.shared < HOPPER_SHARED_BYTES
        assert "tf32" not in each.ptx, "it would round positions and factors to 11 bits"
        if variant.dtype != FP32:
            wide = each.constants["BM"] >= 64
            assert ("wgmma.mma_async" if wide else "mma.sync") in each.ptx
        if NVDISASM.exists():
            assert each.unwritten_registers(tmp_path) == []


@pytest.mark.skipif(not NVDISASM.exists(), reason="nvdisasm is not there")
def test_two_entries_share_tiles_in_registers(tmp_path: Path) -> None:
    """A program has two blocks of queries, and a multiprocessor three programs."""
    variant = Variant(BF16, 1218, 32, half_dense, {"batch": (2, 3)})
    with launch.forced(LaunchSettings(64, 32, 4, 3, 168, entries=2)):
        (compiled,) = variant.compile()
    assert compiled.name == "shared_dense_kernel"
    assert compiled.shared < HOPPER_SHARED_BYTES / 3
    assert compiled.spills_in_loops(tmp_path) == 0
    assert compiled.unwritten_registers(tmp_path) == []
    # one for each product of queries and keys, where nothing is masked
    assert min(found for found in compiled.waits_in_loops(tmp_path) if found[1]) == (2, 8)


def test_entries_of_two_keys_stay_where_the_scores_are() -> None:
    """Read by one instruction, and not moved through shared memory afterwards."""
    windows = VARIANTS["bf16-pairs"]
    alone = dataclasses.replace(
        windows, terms=lambda x: [dataclasses.replace(x.pairs(24), pairs=False)]
    )
    (one,), (other,) = (
        [c for c in variant.compile() if c.name == "attention_kernel"]
        for variant in (windows, alone)
    )
    reads = [each.ptx.count("ld.global.nc.v2.f32") for each in (one, other)]
    assert reads[0] > 0 and reads[1] == 0
    assert 2 * reads[0] == other.ptx.count("ld.global.nc.f32")
    assert one.ptx.count("bar.sync") == other.ptx.count("bar.sync")
    assert one.shared == other.shared


@pytest.mark.skipif(not NVDISASM.exists(), reason="nvdisasm is not there")
def test_two_keys_of_one_region_are_compared_at_once(tmp_path: Path) -> None:
    window = WindowMap(size=(48, 48), window=(24, 24), shift=(12, 12)).regions(CPU)
    sizes: dict[str, Any] = {"batch": (2, 4)}
    counts = []
    for twos in (True, False):
        term = dataclasses.replace(window, pairs=twos)
        variant = Variant(BF16, 576, 32, lambda x, term=term: [term], sizes, ("cosine",))  # type: ignore[misc]
        (compiled,) = (c for c in variant.compile() if c.name == "attention_kernel")
        assert compiled.spills_in_loops(tmp_path) == 0
        counts.append(compiled.counted(tmp_path, " ISETP", "FSEL"))
        scores = compiled.constants["BM"] * compiled.constants["BN"] // (32 * compiled.num_warps)
    # of two scores one comparison, and one choice of what is subtracted
    assert counts[0] <= counts[1] - scores


def test_heads_with_other_terms_are_compiled_apart() -> None:
    compiled = VARIANTS["bf16-heads-differ"].compile()
    assert [c.constants["COLUMNS"] for c in compiled] == [32, 16, 0]


def test_the_variants_cover_every_size_dtype_and_option() -> None:
    variants = VARIANTS.values()
    assert {v.n for v in variants} >= {1, 49, 63, 113, 144, 197, 239, 576}
    assert {v.d for v in variants} >= {8, 24, 30, 40, 72, 80, 96, 256}
    options = {(v.dtype, o) for v in variants for o in v.options}
    assert options >= {(d, o) for d in (FP16, BF16, FP32) for o in ("causal", "cosine", "masked")}
    terms = {(v.dtype, t) for v in variants for t in v.terms(v.inputs())}
    ranks = {t.max_rank for _, t in terms if t.kind == "low_rank"}  # type: ignore[attr-defined]
    assert ranks >= {1, 2, 3, 7, 17, 56}
    kinds = {(d, t.kind) for d, t in terms}  # type: ignore[attr-defined]
    assert kinds >= {(d, kind) for d in (FP16, BF16) for kind in TERM_KINDS}


@pytest.mark.parametrize("d", [8, 30, 96, 256])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_normalising_rows_compiles(dtype: torch.dtype, d: int) -> None:
    compiled = compile_normalize_rows(torch.zeros(2, 3, 49, d, dtype=dtype))
    assert compiled.name == "normalize_rows_kernel"
    assert compiled.shared < HOPPER_SHARED_BYTES


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize(
    ("channels", "heads", "norms"),
    [(128, 16, True), (128, 4, False), (30, 3, True), (256, 64, True)],
)
def test_projecting_pairs_compiles(
    channels: int, heads: int, norms: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    z, weight = torch.zeros(1, 40, 70, channels, dtype=dtype), torch.zeros(heads, channels)
    compiled = compile_projection(z, weight.to(dtype), norms)
    assert compiled.name == "project_pairs_kernel"
    assert compiled.shared < HOPPER_SHARED_BYTES and "tf32" not in compiled.ptx
    if NVDISASM.exists():
        assert compiled.unwritten_registers(tmp_path) == []


def test_projecting_pairs_reads_whole_vectors() -> None:
    """And writes them: it takes as long as the card's memory does."""
    z = torch.zeros(1, 40, 256, 128, dtype=BF16)
    for wide in (z, z.float()):  # as it is, and under autocast
        ptx = compile_projection(wide, torch.zeros(16, 128, dtype=wide.dtype), True, BF16).ptx
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


#: Kernels of common models whose inner loop must keep its numbers in registers. Those that add
#: tiles of numbers are not among them: there a few spills for one more program per multiprocessor
#: are the faster bargain (`scripts/results/tuning.csv`).
COMMON = {
    "windows-rank16": Variant(
        FP16, 64, 32, lambda x: [x.low_rank(16, split=0), x.regions()], {}, ("cosine",)
    ),
    "long-alibi": Variant(BF16, 1024, 64, lambda x: [x.alibi()], {}, ("causal",)),
    "long-rank16": Variant(FP16, 1024, 64, lambda x: [x.low_rank(16, split=0)]),
    "head-size-80": Variant(BF16, 1024, 80, lambda x: [x.low_rank(16, split=0)]),
    "triangle": Variant(BF16, 768, 32, half_dense, {}, ("masked", "gated")),
    "long-triangle": Variant(BF16, 1218, 32, half_dense, {}, ("masked", "gated")),
}


@pytest.mark.skipif(not NVDISASM.exists(), reason="nvdisasm is not there")
@pytest.mark.parametrize("name", COMMON)
def test_common_kernels_fit_registers_where_time_is_spent(name: str, tmp_path: Path) -> None:
    for compiled in COMMON[name].compile():
        assert compiled.spills_in_loops(tmp_path) == 0


@pytest.mark.parametrize("n", [768, 1218])
def test_tiles_of_a_dense_bias_are_read_ahead(n: int) -> None:
    """By the card itself, into room for the steps that come; a bias that moves is read in place."""
    variant = Variant(BF16, n, 32, half_dense)
    with launch.forced(LaunchSettings(128, 32, 4, 3, 168)):
        (compiled,) = variant.compile()
        (without,) = Variant(BF16, n, 32).compile()
    assert "cp.async.bulk.tensor.2d" in compiled.ptx
    tile = 2 * compiled.constants["BM"] * compiled.constants["BN"]
    assert compiled.shared - without.shared > 1.5 * tile
    x = variant.inputs()
    odd = torch.zeros(x.heads, n, n + 1, dtype=FP32)[..., 1:]  # full precision stays
    (other,) = compile_attention(x.q.float(), x.k.float(), x.v.float(), x.bias(Dense(bias=odd)))
    assert "cp.async.bulk.tensor" not in other.ptx


@pytest.mark.parametrize("d", [40, 72])
def test_rows_that_start_at_vectors_are_read_in_vectors(d: int) -> None:
    """Packed projections with such head sizes have strides that are multiples of 8 only."""
    packed = torch.zeros(2, 128, 3, 8, d, dtype=BF16)
    q, k, v = packed.movedim(-3, 0).transpose(-2, -3).unbind(0)
    (compiled,) = compile_attention(q, k, v, None)
    assert compiled.constants["ALIGNED_ROWS"]
    assert compiled.ptx.count("cp.async.cg") >= 16
    odd = torch.zeros(2, 128, 3, 8, d + 1, dtype=BF16)[..., 1:]
    q, k, v = odd.movedim(-3, 0).transpose(-2, -3).unbind(0)
    (compiled,) = compile_attention(q, k, v, None)
    assert not compiled.constants["ALIGNED_ROWS"]


def parameters_of(compiled: Compiled) -> int:
    """Arguments that the kernel is given on the card."""
    entry = compiled.ptx[compiled.ptx.index(".entry") :]
    return entry[: entry.index("{")].count(".param")


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.n == 1])
def test_parts_of_the_keys_compile(name: str) -> None:
    """Two arguments more, the numbers left for the second kernel and how many parts there are."""
    (whole,) = VARIANTS[name].compile()
    with launch.split_into(3):
        part, combine = VARIANTS[name].compile()
    assert (part.name, combine.name) == ("attention_kernel", "combine_parts_kernel")
    assert max(part.shared, combine.shared) < HOPPER_SHARED_BYTES
    assert parameters_of(part) == parameters_of(whole) + 2
    assert part.constants == whole.constants


def test_the_largest_sums_of_parts_compile() -> None:
    """64 rows of 256 numbers, all at once, and never in the order of a race."""
    x = Inputs(CPU, FP16, n=1, m=600, d=16, dv=256)
    with launch.split_into(MOST_PARTS):
        _, combine = compile_attention(x.q, x.k, x.v, None)
    assert (combine.constants["PARTS"], combine.constants["DV"]) == (64, 256)
    assert combine.shared < HOPPER_SHARED_BYTES
    assert not re.search(r"\b(atom|red)\.", combine.ptx)


@pytest.mark.parametrize("option", ["gated", "long"])
def test_calls_that_have_no_parts(option: str) -> None:
    """The same kernel, whatever the number of parts: what is not used costs nothing."""
    n = 100 if option == "long" else 1
    variant = Variant(BF16, n, 64, sizes={"m": 8192}, options=(option,))
    with launch.split_into(1):
        (whole,) = variant.compile()
    (found,) = variant.compile()
    assert found.ptx == whole.ptx


@pytest.mark.parametrize("wanted", ["phi_q", "phi_k"])
def test_the_gradient_of_one_factor_compiles(wanted: str) -> None:
    phi_q, phi_k = torch.zeros(2, 3, 49, 17), torch.zeros(3, 40, 17)
    compiled = compile_factors(phi_q, phi_k, 5, 0.125, wanted=[wanted])
    assert [c.name for c in compiled] == ["factor_columns_kernel", "factor_gradients_kernel"]


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("scales", ["number", "heads", "undivided"])
def test_kernels_of_factors_compile(scales: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Products stay apart from sums: a card rounds each as torch does, to the last bit."""
    phi_q, phi_k = torch.zeros(2, 3, 49, 17), torch.zeros(3, 40, 17, dtype=dtype)
    scale = {"number": 0.125, "heads": torch.ones(3), "undivided": None}[scales]
    for again in ({}, {"phi_k": BF16}, {"phi_q": BF16, "phi_k": BF16}):
        if scale is None and again:
            continue
        compiled = compile_factors(phi_q, phi_k, 5, scale, again)
        assert [c.name for c in compiled] == ["factor_columns_kernel", "factor_gradients_kernel"]
        assert not any("fma" in c.ptx for c in compiled)
        # to the nearest number, of two that are as near to the even one
        assert ("cvt.rn.bf16" in compiled[0].ptx) == bool(again)
        assert not re.search(r"cvt\.r[zmp]\.", compiled[0].ptx)
        for each in compiled if NVDISASM.exists() else []:
            assert each.unwritten_registers(tmp_path) == [], each.name
