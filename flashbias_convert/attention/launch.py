"""Launches the Triton kernel: batch dimensions, strides and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .packing import GroupSpec
from .tuning import launch_settings

#: Names of the optional tensors, with how many trailing dimensions follow the batch dimensions.
#: The head dimension, where there is one, comes first among them.
TERM_TENSORS = {
    "phi_q": 3,
    "phi_k": 3,
    "key_bias": 2,
    "key_bias_rows": 2,
    "slopes": 1,
    "alibi_rows": 2,
    "pos_q": 1,
    "pos_k": 1,
    "table": 2,
    "table_rows": 2,
    "ids": 1,
    "key_ids": 1,
    "region_rows": 2,
    "dense": 3,
    "dense_rows": 2,
}
#: Tensors of the call, likewise.
CALL_TENSORS = {"key_mask": 1, "starts": 0}
#: Vectors that all batch entries and heads share.
VECTORS = ("heads", "codes_q", "codes_k")
_TAILS = {"q": 3, "k": 3, "v": 3, "o": 3, **TERM_TENSORS, **CALL_TENSORS}
#: Batch dimensions that the kernel can tell apart.
MAX_BATCH_DIMS = 3


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    *,
    scale: float | Tensor,
    causal: bool,
    query_start: int,
    cosine: bool,
) -> None:
    """Run the kernel for one group of heads; writes the heads of the group into `out`.

    Args:
        q, k, v, out: shapes (*batch, H, N, D), (*batch, Hkv, M, D), (*batch, Hkv, M, Dv) and
            (*batch, H, N, Dv), any strides.
        spec: the group.
        tensors: the group's tensors by name, and `key_mask` and `starts` where present; batch
            dimensions broadcast.
        scale: number or fp32 tensor (H,).
        causal, query_start, cosine: see `flashbias_attention`.
    """
    if out.numel() == 0:
        return
    all_tensors = {"q": q, "k": k, "v": v, "o": out, **tensors}
    batch = tuple(q.shape[:-3])
    sizes, strides = collapse_batch(
        batch, [_batch_strides(n, t, batch) for n, t in all_tensors.items()]
    )
    if len(sizes) > MAX_BATCH_DIMS:
        _launch_by_slices(q, k, v, out, spec, tensors, scale, causal, query_start, cosine)
        return
    arguments, meta = kernel_arguments(
        all_tensors,
        sizes,
        dict(zip(all_tensors, strides, strict=True)),
        spec,
        scale=scale,
        causal=causal,
        query_start=query_start,
        cosine=cosine,
    )
    _run(arguments, meta, q)


def _launch_by_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    scale: float | Tensor,
    causal: bool,
    query_start: int,
    cosine: bool,
) -> None:
    """One launch per entry of the first batch dimension."""
    dims = len(q.shape) - 3

    def entry(name: str, tensor: Tensor, i: int) -> Tensor:
        if name in VECTORS or tensor.dim() - _TAILS[name] < dims:
            return tensor
        return tensor[i if tensor.shape[0] > 1 else 0]

    for i in range(q.shape[0]):
        launch(
            q[i],
            k[i],
            v[i],
            out[i],
            spec,
            {n: entry(n, t, i) for n, t in tensors.items()},
            scale=scale,
            causal=causal,
            query_start=query_start,
            cosine=cosine,
        )


def kernel_arguments(
    tensors: Mapping[str, Tensor],
    batch: Sequence[int],
    batch_strides: Mapping[str, Sequence[int]],
    spec: GroupSpec,
    *,
    scale: float | Tensor,
    causal: bool,
    query_start: int,
    cosine: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments by name, and launch options (num_warps, num_stages, grid)."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    sizes = [1] * (MAX_BATCH_DIMS - len(batch)) + list(batch)
    n, m, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    heads = q.shape[-3] if spec.heads is None else len(spec.heads)
    block_d, block_dv = _padded(d), _padded(dv)
    settings = launch_settings(
        n=n,
        m=m,
        d=block_d,
        dv=block_dv,
        columns=spec.columns,
        half=q.dtype != torch.float32,
        elementwise=bool(set(spec.tensors) - {"heads", "phi_q", "phi_k"}),
    )
    arguments: dict[str, Any] = {}
    for name in (*_TAILS, *VECTORS):
        tensor = tensors.get(name)
        arguments[f"{name}_ptr"] = tensor
        if name not in VECTORS:
            arguments[f"{name}_strides"] = (
                None
                if tensor is None
                else (*_three(batch_strides[name]), *_own_strides(name, tensor))
            )
    per_head = isinstance(scale, Tensor)
    arguments |= {
        "scale": 1.0 if per_head else float(scale),
        "scale_ptr": scale if per_head else None,
        "query_start": query_start,
        "region_value": spec.region_value,
        "batch_1": sizes[1],
        "batch_2": sizes[2],
        "G": heads,
        "kv_group": q.shape[-3] // k.shape[-3],
        "N": n,
        "M": m,
        "D": d,
        "DV": dv,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "COLUMNS": spec.columns,
        "SPLIT": spec.split,
        "CAUSAL": causal,
        "COSINE": cosine,
        "SYMMETRIC": spec.symmetric,
        "BM": settings.block_m,
        "BN": settings.block_n,
    }
    blocks = -(-n // settings.block_m)
    programs = blocks * heads * sizes[0] * sizes[1] * sizes[2]
    return arguments, {
        "grid": (programs,),
        "num_warps": settings.num_warps,
        "num_stages": settings.num_stages,
    }


def _run(arguments: dict[str, Any], meta: dict[str, Any], q: Tensor) -> None:
    from .triton_forward import attention_kernel

    options = {"num_warps": meta["num_warps"], "num_stages": meta["num_stages"]}
    if q.device.type == "cuda":
        # Triton launches on the current device, whatever device the tensors are on
        with torch.cuda.device(q.device):
            attention_kernel[meta["grid"]](**arguments, **options)
    else:
        attention_kernel[meta["grid"]](**arguments, **options)


# -- strides -------------------------------------------------------------------------------


def collapse_batch(
    batch: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Merge batch dimensions that every tensor walks in one step.

    Args:
        batch: sizes of the batch dimensions.
        strides: for each tensor its strides over them, 0 where it broadcasts.

    Returns:
        Sizes of the remaining dimensions, and strides over them for each tensor.
    """
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        here = [s[axis] for s in strides]
        if sizes and all(m[-1] == s * size for m, s in zip(merged, here, strict=True)):
            sizes[-1] *= size
            for own, stride in zip(merged, here, strict=True):
                own[-1] = stride
            continue
        sizes.append(size)
        for own, stride in zip(merged, here, strict=True):
            own.append(stride)
    return sizes, merged


def _batch_strides(name: str, tensor: Tensor, batch: tuple[int, ...]) -> list[int]:
    """Strides over the batch dimensions of the call, 0 where the tensor broadcasts."""
    if name in VECTORS:
        return [0] * len(batch)
    lead = tensor.dim() - _TAILS[name]
    own = [0 if tensor.shape[i] == 1 else tensor.stride(i) for i in range(lead)]
    own = own[max(lead - len(batch), 0) :]
    return [0] * (len(batch) - len(own)) + own


def _own_strides(name: str, tensor: Tensor) -> list[int]:
    """Strides after the batch dimensions; 0 for a head dimension that all heads share."""
    tail = _TAILS[name]
    strides = [tensor.stride(i) for i in range(tensor.dim() - tail, tensor.dim())]
    has_heads = tail >= 2 or name == "slopes"
    if has_heads and tensor.shape[tensor.dim() - tail] == 1:
        strides[0] = 0
    if name.endswith("_rows") and tensor.shape[-1] == 1:
        strides[-1] = 0
    return strides


def _three(strides: Sequence[int]) -> tuple[int, ...]:
    return (*(0,) * (MAX_BATCH_DIMS - len(strides)), *strides)


def _padded(size: int) -> int:
    """The power of two, at least 16, that a matrix product needs."""
    return max(16, 1 << (size - 1).bit_length())
