"""The backward kernels compile for sm_90 at awkward sizes, and common ones fit registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert import Axial, ScoreBias
from flashbias_convert.attention import backward_launch
from flashbias_convert.attention.tuning import LaunchSettings, backward_settings

from .cases import Inputs
from .conftest import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("Triton's interpreter does not compile", allow_module_level=True)

from .ahead_of_time import (  # noqa: E402
    HOPPER_SHARED_BYTES,
    NVDISASM,
    Compiled,
    compile_training,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Variant:
    """One call to compile for, forward and backward.

    Attributes:
        dtype: of q, k and v.
        n, d: queries and head size.
        terms: builds the terms of the bias, all of which ask for gradients.
        kernels: the backward kernels that must be there.
        options: arguments of the call.
        in_registers: whether no number may spill in an inner loop.
        forward: compile the forward kernel that keeps sums of rows, too.
        deterministic: see `flashbias_attention`.
    """

    dtype: torch.dtype
    n: int
    d: int
    terms: Callable[[Inputs], Sequence[Any]] = lambda x: ()
    kernels: tuple[str, ...] = ("delta", "query_gradients", "key_gradients")
    options: dict[str, Any] = field(default_factory=dict)
    in_registers: bool = True
    forward: bool = False
    deterministic: bool = True

    def compile(self) -> list[Compiled]:
        x = Inputs(torch.device("cpu"), self.dtype, n=self.n, d=self.d, heads=2)
        q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
        terms = tuple(
            term.map_tensors(lambda _, t: t.requires_grad_() if t.is_floating_point() else t)
            for term in self.terms(x)
        )
        options = dict(self.options)
        if options.pop("learnt_scale", False):
            options["scale"] = torch.ones(2, requires_grad=True)
        bias = ScoreBias(terms, 2) if terms else None
        given = {"forward": self.forward, "deterministic": self.deterministic, **options}
        return compile_training(q, k, v, bias, **given)


WITH_PAIRS = ("delta", "query_gradients", "key_gradients", "pair_gradients")
WITH_TABLES = (*WITH_PAIRS, "sums_by_code")
WITH_ATOMICS = ("delta", "all_gradients", "finish_queries")


def without_pairs(x: Inputs) -> Sequence[Any]:
    gated = [x.rows(term) for term in (x.key_bias(), x.alibi(), x.regions(), x.diagonal())]
    return (*gated, x.axial())


def wide_axial(x: Inputs) -> Axial:
    """Two walks over the keys, and more columns than factors of a term may have."""
    rel_h, rel_w = (x.normal(2, x.n, size) for size in (150, 130))
    return Axial(rel_h=rel_h, rel_w=rel_w, y=x.integers(150, x.m), x=x.integers(130, x.m))


VARIANTS = {
    "windows-table": Variant(
        FP16, 144, 32, lambda x: [x.table(), x.regions()], WITH_TABLES,
        {"cosine": True, "learnt_scale": True},
    ),
    "windows-rank16": Variant(
        BF16, 256, 48, lambda x: [x.low_rank(16, split=0), x.regions()],
        options={"cosine": True, "learnt_scale": True}, in_registers=False,
    ),
    "windows-rank16-atomics": Variant(
        BF16, 256, 24, lambda x: [x.low_rank(16, split=0)], WITH_ATOMICS,
        {"cosine": True, "learnt_scale": True}, deterministic=False, in_registers=False,
    ),
    "long-rank16": Variant(BF16, 576, 64, lambda x: [x.low_rank(16, split=0)], forward=True),
    "long-alibi": Variant(BF16, 576, 64, lambda x: [x.alibi()], options={"causal": True}),
    "decode-rank1": Variant(FP16, 1, 40, lambda x: [x.low_rank(1)], forward=True),
    "rank17-head-size-72": Variant(
        BF16, 113, 72, lambda x: [x.low_rank(17, split=0)], in_registers=False
    ),
    "rank56-dense": Variant(
        BF16, 197, 24, lambda x: [x.low_rank(56, split=0), x.dense()], WITH_PAIRS
    ),
    "thin-terms": Variant(
        FP16, 49, 8, without_pairs, options={"causal": True}, in_registers=False
    ),
    "axial-walks": Variant(BF16, 197, 64, lambda x: [wide_axial(x)], options={"causal": True}),
    "axial-walks-rank56": Variant(
        FP16, 197, 64, lambda x: [x.low_rank(56, split=0), wide_axial(x)]
    ),
    "axial-walks-head-size-80": Variant(BF16, 197, 80, lambda x: [wide_axial(x)]),
    "axial-rank240": Variant(BF16, 113, 64, lambda x: [x.low_rank(240, split=0), x.axial()]),
    "axial-walks-fp32": Variant(FP32, 63, 64, lambda x: [wide_axial(x)]),
    "lookup-rows": Variant(BF16, 63, 16, lambda x: [x.rows(x.lookup())], WITH_TABLES),
    "atomics": Variant(BF16, 576, 64, kernels=WITH_ATOMICS, deterministic=False),
    "atomics-rank16": Variant(
        BF16, 576, 64, lambda x: [x.low_rank(16, split=0)], WITH_ATOMICS, deterministic=False
    ),
    "atomics-rank32-windows": Variant(
        FP16, 144, 32, lambda x: [x.low_rank(32, split=0)], WITH_ATOMICS,
        {"cosine": True, "learnt_scale": True}, deterministic=False, in_registers=False,
    ),
    "atomics-rank56-head-size-72": Variant(
        BF16, 113, 72, lambda x: [x.low_rank(56, split=0), x.alibi()], WITH_ATOMICS,
        {"causal": True}, deterministic=False, in_registers=False,
    ),
    "atomics-fp32": Variant(
        FP32, 63, 12, lambda x: [x.low_rank(2), x.key_bias()], WITH_ATOMICS, deterministic=False
    ),
    "fp32-rank2": Variant(FP32, 63, 12, lambda x: [x.low_rank(2), x.key_bias()]),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_backward_kernels_compile(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    compiled = variant.compile()
    assert {c.name for c in compiled} >= {f"{kernel}_kernel" for kernel in variant.kernels}
    for each in compiled:
        assert each.shared < HOPPER_SHARED_BYTES
        if NVDISASM.exists():
            assert each.unwritten_registers(tmp_path) == [], each.name
            if variant.in_registers:
                assert each.spills_in_loops(tmp_path) == 0, each.name
        if variant.dtype != FP32 and each.name in (
            "query_gradients_kernel",
            "key_gradients_kernel",
            "all_gradients_kernel",
        ):
            assert "mma" in each.ptx


@pytest.mark.skipif(not NVDISASM.exists(), reason="needs nvdisasm")
@pytest.mark.parametrize("d", [16, 24, 32])
def test_lanes_agree_on_the_sum_of_a_row(d: int, tmp_path: Path) -> None:
    """All lanes of a row store its sum at one place, so they must have the same bits.

    With one column a lane (24 are read one by one), products that are not rounded before they are
    added would make a sum that is the lane's own.
    """
    (delta,) = [c for c in Variant(FP32, 256, d).compile() if c.name == "delta_kernel"]
    assert delta.counted(tmp_path, "SHFL.BFLY") and delta.counted(tmp_path, "FMUL")
    assert delta.counted(tmp_path, "FFMA") == 0


def test_settings_can_be_forced() -> None:
    settings = LaunchSettings(32, 64, 4, 1)
    assert settings != backward_settings("keys", rows=64, d=32, dv=32, columns=0, half=True)
    with backward_launch.forced("keys", settings):
        compiled = Variant(BF16, 64, 32).compile()
    blocks = {
        c.name: (c.constants["BM"], c.constants["BN"]) for c in compiled if "BM" in c.constants
    }
    assert blocks["key_gradients_kernel"] == (32, 64)
    assert blocks["query_gradients_kernel"] == (64, 64)
    assert backward_launch._FORCED == {}
