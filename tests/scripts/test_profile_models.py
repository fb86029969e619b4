"""Kernels by what they do."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import profile_models  # noqa: E402
from whole_models.measuring import at_once  # noqa: E402
from whole_models.writing import read_rows  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

KERNELS = {
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<...>", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x64",
        "triton_tem_fused_flex_attention_0", "void cunn_SoftMaxForward<...>",
        "attention_kernel", "triton_per_fused__softmax_1",
    ),
    "matrix products": (
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT", "sm90_xmma_gemm_bf16bf16_bf16f32_f32",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "aten::addmm",
        "aten::bmm", "triton_tem_fused_mm_3", "void cublasLt::splitKreduce_kernel<32, 16>",
    ),
    "normalisation and activation": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>",
        "triton_per_fused_add_native_layer_norm_2", "triton_poi_fused_addmm_gelu_1",
        "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>",
    ),
    "copies and casts": (
        "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>",
        "Memcpy DtoD (Device -> Device)", "void at::native::(anonymous)::CatArrayBatchedCopy<...>",
        "void at::native::(anonymous namespace)::roll_cuda_kernel<c10::BFloat16>", "aten::clone",
        "triton_poi_fused__to_copy_0", "triton_poi_fused_convert_element_type_0",
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_0",
    ),
    "other": ("triton_poi_fused_add_0", "aten::mul", "aten::commutes"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_names_of_kernels_tell_what_they_do(name: str) -> None:
    assert {kernel: profile_models.class_of(kernel) for kernel in KERNELS[name]} == dict.fromkeys(
        KERNELS[name], name
    )


def test_classes_add_up() -> None:
    found = profile_models.in_classes(
        [("aten::mm", 1.0, 2), ("aten::copy_", 0.5, 1), ("x", 0.25, 1)]
    )
    assert (found["matrix_products_ms"], found["copies_and_casts_ms"], found["other_ms"]) == (
        "1.0000", "0.5000", "0.2500",
    )  # fmt: skip
    assert (found["kernels_ms"], found["launches"]) == ("1.7500", "4")


def test_rows_and_their_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.csv"
    options = argparse.Namespace(device="cpu", dtype="float32", tiny=True, output=path)
    for variant in ("original", "exact"):
        profile_models.profile_job("gpt2-prefill-2k", variant, options, at_once)
    rows = read_rows(path)
    assert [row["variant"] for row in rows] == ["original", "exact"]
    for row in rows:
        assert row["status"] == "measured", row["reason"]
        parts = [float(row[key]) for key in profile_models._KEYS.values()]
        assert sum(parts) == pytest.approx(float(row["kernels_ms"]), abs=1e-3)
        assert parts[0] > 0 and parts[1] > 0
    kernels = read_rows(profile_models.kernel_path(path))
    assert {row["variant"] for row in kernels} == {"original", "exact"}
    profile_models.draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 0
