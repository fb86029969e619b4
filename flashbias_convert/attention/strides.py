"""How tensors of a call are walked: batch dimensions, heads, and what broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

#: Batch dimensions that kernels can tell apart.
MAX_BATCH_DIMS = 3
#: Widest access of a thread, in bytes.
VECTOR_BYTES = 16

#: Tensors of a term or of the call -> how many dimensions follow their batch dimensions. The
#: head dimension, where there is one, comes first among them.
TAILS = {
    "q": 3,
    "k": 3,
    "v": 3,
    "o": 3,
    "gate": 3,
    "key_mask": 1,
    "starts": 0,
    "phi_q": 3,
    "phi_k": 3,
    "phi_q_rounded": 3,
    "phi_k_rounded": 3,
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
    "diagonal": 2,
    "diagonal_rows": 2,
    "lookup": 2,
    "lookup_rows": 2,
    "lookup_code": 2,
    "rel_h": 3,
    "rel_w": 3,
    "axial_rows": 2,
    # of the backward pass
    "lse": 3,
    "delta": 2,
    "do": 3,
    "raw_q": 3,
    "raw_k": 3,
    "dq": 3,
    "dk": 3,
    "dv": 3,
    "q_sums": 3,
    "phi_q_sums": 3,
}
#: Vectors that all batch entries share.
VECTORS = ("heads", "codes_q", "codes_k", "axial_y", "axial_x", "scale")


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


def batch_strides(name: str, tensor: Tensor, batch: Sequence[int]) -> list[int]:
    """Strides over the batch dimensions of the call, 0 where the tensor broadcasts."""
    lead = tensor.dim() - TAILS[name]
    own = [0 if tensor.shape[i] == 1 else tensor.stride(i) for i in range(lead)]
    own = own[max(lead - len(batch), 0) :]
    return [0] * (len(batch) - len(own)) + own


def own_strides(name: str, tensor: Tensor) -> list[int]:
    """Strides after the batch dimensions; 0 for a dimension that all heads or rows share."""
    tail = TAILS[name]
    strides = [tensor.stride(i) for i in range(tensor.dim() - tail, tensor.dim())]
    has_heads = (tail >= 2 and name != "lookup_code") or name == "slopes"
    if has_heads and tensor.shape[tensor.dim() - tail] == 1:
        strides[0] = 0
    if name.endswith("_rows") and tensor.shape[-1] == 1:
        strides[-1] = 0
    return strides


def batch_entry(name: str, tensor: Tensor, dims: int, i: int) -> Tensor:
    """Entry `i` of the first of `dims` batch dimensions."""
    if name in VECTORS:
        return tensor
    while tensor.dim() - TAILS[name] > dims:  # leading ones beyond the batch of the call
        tensor = tensor[0]
    if tensor.dim() - TAILS[name] < dims:
        return tensor
    return tensor[i if tensor.shape[0] > 1 else 0]


def vector_rows(tensor: Tensor) -> bool:
    """Whether every row starts at a multiple of a vector, if the tensor does.

    Triton sees only whether a stride in elements is a multiple of 16. In a packed projection with
    a head size of 40 or 72 that is true of rows but not of heads, and it would read single numbers.
    """
    return _whole_vectors(tensor.stride(), tensor.element_size())


@lru_cache(maxsize=4096)
def _whole_vectors(strides: tuple[int, ...], size: int) -> bool:
    *outer, last = strides
    return last == 1 and all(s * size % VECTOR_BYTES == 0 for s in outer)


def reach(tensor: Tensor) -> int:
    """Largest offset within the last two dimensions, of which the kernel reads tiles."""
    return sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape[-2:], tensor.stride()[-2:], strict=True)
    )


def padded(size: int) -> int:
    """The power of two, at least 16, that a matrix product needs."""
    return max(16, 1 << (size - 1).bit_length())
