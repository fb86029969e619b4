"""The kernels of a call of few queries, as compiled graphs launch them themselves.

Tensors alone are arguments: all else is fixed in a graph whose sizes are, and a launch with a
hundred arguments would take a host longer than the card works.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .local_settings import fingerprint
from .rules_text import digest_of_rules
from .triton_combine import combine_parts_kernel
from .triton_forward import attention_kernel

#: torch keeps compiled graphs on disk, by the text of their kernels: this tells those of
#: other rules of launches, and of other settings, apart
MADE_BY = tl.constexpr(f"{digest_of_rules()} {fingerprint()}")


@triton.jit
def traced_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, scale_ptr, heads_ptr, key_mask_ptr, starts_ptr, phi_q_ptr,
    phi_k_ptr, key_bias_ptr, key_bias_rows_ptr, slopes_ptr, alibi_rows_ptr, pos_q_ptr, pos_k_ptr,
    table_ptr, table_rows_ptr, codes_q_ptr, codes_k_ptr, ids_ptr, key_ids_ptr, region_rows_ptr,
    dense_ptr, dense_rows_ptr, diagonal_ptr, diagonal_rows_ptr, lookup_ptr, lookup_rows_ptr,
    lookup_code_ptr, rel_h_ptr, rel_w_ptr, axial_rows_ptr, axial_y_ptr, axial_x_ptr, lse_ptr,
    gate_ptr, parts_ptr,
    q_strides: tl.constexpr, k_strides: tl.constexpr, v_strides: tl.constexpr,
    o_strides: tl.constexpr, scale: tl.constexpr, key_mask_strides: tl.constexpr,
    query_start: tl.constexpr, starts_strides: tl.constexpr, phi_q_strides: tl.constexpr,
    phi_k_strides: tl.constexpr, key_bias_strides: tl.constexpr,
    key_bias_rows_strides: tl.constexpr, slopes_strides: tl.constexpr,
    alibi_rows_strides: tl.constexpr, pos_q_strides: tl.constexpr, pos_k_strides: tl.constexpr,
    table_strides: tl.constexpr, table_rows_strides: tl.constexpr, ids_strides: tl.constexpr,
    key_ids_strides: tl.constexpr, region_rows_strides: tl.constexpr, dense_strides: tl.constexpr,
    dense_desc: tl.constexpr, dense_rows_strides: tl.constexpr, diagonal_strides: tl.constexpr,
    diagonal_rows_strides: tl.constexpr, lookup_strides: tl.constexpr,
    lookup_rows_strides: tl.constexpr, lookup_code_strides: tl.constexpr,
    rel_h_strides: tl.constexpr, rel_w_strides: tl.constexpr, axial_rows_strides: tl.constexpr,
    lse_strides: tl.constexpr, gate_strides: tl.constexpr, parts: tl.constexpr,
    region_value: tl.constexpr, batch_1: tl.constexpr, batch_2: tl.constexpr, G: tl.constexpr,
    kv_group: tl.constexpr, N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr, PAIRS: tl.constexpr, DIVIDED: tl.constexpr, REGION_PAIRS: tl.constexpr,
    PLAIN_SCALE: tl.constexpr, NATURAL: tl.constexpr, ALIGNED_ROWS: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, COSINE: tl.constexpr, SYMMETRIC: tl.constexpr,
    BOUNDED: tl.constexpr, QUICK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tl.static_assert(MADE_BY != "")
    attention_kernel(
        q_ptr, k_ptr, v_ptr, o_ptr, q_strides, k_strides, v_strides, o_strides, scale, scale_ptr,
        heads_ptr, key_mask_ptr, key_mask_strides, query_start, starts_ptr, starts_strides,
        phi_q_ptr, phi_q_strides, phi_k_ptr, phi_k_strides, key_bias_ptr, key_bias_strides,
        key_bias_rows_ptr, key_bias_rows_strides, slopes_ptr, slopes_strides, alibi_rows_ptr,
        alibi_rows_strides, pos_q_ptr, pos_q_strides, pos_k_ptr, pos_k_strides, table_ptr,
        table_strides, table_rows_ptr, table_rows_strides, codes_q_ptr, codes_k_ptr, ids_ptr,
        ids_strides, key_ids_ptr, key_ids_strides, region_rows_ptr, region_rows_strides,
        dense_ptr, dense_strides, dense_desc, dense_rows_ptr, dense_rows_strides, diagonal_ptr,
        diagonal_strides, diagonal_rows_ptr, diagonal_rows_strides, lookup_ptr, lookup_strides,
        lookup_rows_ptr, lookup_rows_strides, lookup_code_ptr, lookup_code_strides, rel_h_ptr,
        rel_h_strides, rel_w_ptr, rel_w_strides, axial_rows_ptr, axial_rows_strides, axial_y_ptr,
        axial_x_ptr, lse_ptr, lse_strides, gate_ptr, gate_strides, parts_ptr, parts, region_value,
        batch_1, batch_2, G, kv_group, N, M, D, DV, BLOCK_D, BLOCK_DV, COLUMNS, SPLIT, SCALED,
        PAIRS, DIVIDED, REGION_PAIRS, PLAIN_SCALE, NATURAL, ALIGNED_ROWS, WIDE, CAUSAL, COSINE,
        SYMMETRIC, BOUNDED, QUICK, BM, BN,
    )  # fmt: skip


@triton.jit
def traced_combine_kernel(
    parts_ptr, o_ptr, heads_ptr,
    o_strides: tl.constexpr, parts: tl.constexpr, batch_1: tl.constexpr, batch_2: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    tl.static_assert(MADE_BY != "")
    combine_parts_kernel(
        parts_ptr, o_ptr, o_strides, heads_ptr, parts, batch_1, batch_2, G, N, DV, BLOCK_DV,
        PARTS,
    )  # fmt: skip
