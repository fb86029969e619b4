"""Attention as an expert writes it by hand: the bias is made once, as a dense matrix.

On the CPU FlexAttention is not compiled, which shows that it is right and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flashbias_convert.benchmark import peers

from .case import BY_ROWS, CUDNN, FLEX, NO_BIAS, SDPA

#: cells of scores in float32 at once, by rows
_CELLS = 2**28
#: rows of a matrix begin at multiples of so many entries: some fused kernels copy it else, in every
#: call
_ALIGNMENT = 16


class HandAttention(nn.Module):
    """Attention of windows whose biases are known, by one of the ways.

    Args:
        way: `SDPA`, `FLEX`, `NO_BIAS`, one of them with cuDNN, or `BY_ROWS`.
        bias: masks included, shape (P, H, N, N): entry b of the batch takes bias b % P. Not used
            without a bias: there are no masks then, either.
        scale: of the scores.
    """

    bias: Tensor

    def __init__(self, way: str, bias: Tensor, scale: float) -> None:
        super().__init__()
        self.cudnn, way = way in CUDNN, CUDNN.get(way, way)
        self.way, self.scale = way, scale
        self.windows = len(bias)
        self.keys = bias.shape[-1]
        if way != NO_BIAS:  # with its padding: a slice would lose that when it is cast
            self.register_buffer("bias", with_aligned_rows(bias.detach()), persistent=False)
        self._flex = flex_on(bias.device) if way == FLEX else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes (B, H, N, D) to the same shape."""
        if self.way == NO_BIAS:
            return sdpa(q, k, v, None, self.scale, cudnn=self.cudnn)
        if self.way == SDPA:
            return self._sdpa(q, k, v)
        if self.way == FLEX:
            return self._flexible(q, k, v)
        assert self.way == BY_ROWS
        place = torch.arange(len(q), device=q.device) % self.windows
        return attention_by_rows(
            q, k, v, lambda h, rows: self._matrix()[place][:, h, rows], scale=self.scale
        )

    def _matrix(self) -> Tensor:
        """The bias without its padding: a view, whose rows are aligned."""
        return self.bias[..., : self.keys]

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.windows == 1:
            return sdpa(q, k, v, self._matrix(), self.scale, cudnn=self.cudnn)
        # windows as heads: the bias is then the same for the whole batch, and nothing repeats it
        _, heads, n, d = q.shape
        q, k, v = (x.reshape(-1, self.windows * heads, n, d) for x in (q, k, v))
        bias = self._matrix().flatten(0, 1)[None]
        out = sdpa(q, k, v, bias, self.scale, cudnn=self.cudnn)
        return out.reshape(-1, heads, n, d)

    def _flexible(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._flex is not None
        if self.windows == 1:
            return self._flex(q, k, v, self._matrix()[0], None, None, self.scale)
        place = torch.arange(len(q), device=q.device) % self.windows
        return self._flex(q, k, v, self._matrix(), place, None, self.scale)


@torch.library.custom_op("flashbias_scripts::whole", mutates_args=())
def whole(x: Tensor) -> Tensor:
    """The same numbers in memory of their own.

    A compiler computes a bias again for each score inside of FlexAttention's kernel where it knows
    how: then it is none that is read.
    """
    return x.clone()


@whole.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def aligned(keys: int) -> int:
    """Entries of a row that fused kernels can read: `keys` and some padding."""
    return -(-keys // _ALIGNMENT) * _ALIGNMENT


def with_aligned_rows(bias: Tensor) -> Tensor:
    """Contiguous, rows padded with zeros to what `aligned` says; the same tensor if that is so.

    A table that is looked up by heads, as (N, M, H), is no contiguous (H, N, M): fused kernels
    refuse it, and others read it slowly.
    """
    missing = aligned(bias.shape[-1]) - bias.shape[-1]
    return F.pad(bias, (0, missing)).contiguous() if missing else bias.contiguous()


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    *,
    causal: bool = False,
    cudnn: bool = False,
) -> Tensor:
    """torch's attention with the kernel that torch chooses, or with cuDNN's and no other.

    Args:
        q, k, v: shapes (B, H, N, D).
        bias: added to the scores, with one for every head; or None.
        scale: of the scores.
        causal: hide the keys after a query; only without a bias.
        cudnn: cuDNN's kernel or none. The CPU, which has none, does not care.

    Raises:
        RuntimeError: cuDNN's kernel does not take this call.
    """
    if cudnn and q.is_cuda:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale)


def causal_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """For `create_block_mask`."""
    return j <= i


def flex_alibi(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    slots: Tensor,
    blocks: BlockMask | None,
    scale: float,
) -> Tensor:
    """FlexAttention with causal ALiBi computed in its score_mod, as its authors show it.

    Args:
        q, k, v: shapes (B, H, N, D).
        slopes: (H,).
        slots: places of the queries among the keys, (N,).
        blocks: of `causal_mask`; None: the score_mod hides the keys after a query.
        scale: of the scores.
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        biased = score + slopes[h] * (j - slots[i])
        return torch.where(j <= slots[i], biased, float("-inf")) if blocks is None else biased

    out: Any = flex_attention(q, k, v, score_mod, block_mask=blocks, scale=scale)
    return out


def flex_alibi_on(device: torch.device) -> Callable[..., Tensor]:
    """`flex_alibi`, compiled on a card."""
    return torch.compile(flex_alibi, dynamic=False) if device.type == "cuda" else flex_alibi


def flex_bare(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None, scale: float) -> Tensor:
    """FlexAttention without a bias."""
    out: Any = flex_attention(q, k, v, block_mask=blocks, scale=scale)
    return out


def flex_bare_on(device: torch.device) -> Callable[..., Tensor]:
    """`flex_bare`, compiled on a card."""
    return torch.compile(flex_bare, dynamic=False) if device.type == "cuda" else flex_bare


def flex_on(device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention with a dense bias, compiled where that is worth while; see `peers.Flex`."""
    if device.type == "cuda":
        attend: Callable[..., Tensor] = peers.Flex().attend
        return attend
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return peers._flex


def attention_by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Callable[[int, slice], Tensor],
    *,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """The formula, head by head and a few rows at a time: slow, and needs little memory.

    Args:
        q, k, v: shapes (B, H, N, D).
        added: called with a head and its rows; returns what is added, (B or 1, rows, N), in the
            dtype in which the original adds it.
        scale: of the scores.
        causal: whether keys after the query are hidden.
    """
    out = torch.empty_like(v)
    batch, heads, n, _ = q.shape
    step = max(1, _CELLS // (batch * n))
    keys = torch.arange(n, device=q.device)
    for h in range(heads):
        for first in range(0, n, step):
            rows = slice(first, min(n, first + step))
            scores = (q[:, h, rows] @ k[:, h].transpose(-1, -2)).mul_(scale)
            scores = scores + added(h, rows)
            if causal:
                scores.masked_fill_(keys > keys[rows, None], float("-inf"))
            out[:, h, rows] = scores.softmax(-1).to(v.dtype) @ v[:, h]
    return out


def replace_children(
    model: nn.Module, kind: type[nn.Module], make: Callable[[Any, Any], nn.Module]
) -> nn.Module:
    """Replace every child of a class.

    Args:
        model: changed in place.
        kind: the class.
        make: called with the module and its parent.

    Raises:
        RuntimeError: there is none.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, kind)
    ]
    if not found:
        raise RuntimeError(f"no {kind.__name__} in {type(model).__name__}")
    for parent, name, child in found:
        setattr(parent, name, make(child, parent))
    return model
