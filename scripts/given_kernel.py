"""A kernel from a file that the user gives, as a peer of the benchmarks.

The file defines one of two functions. Factors are of shape (B, H, N, R), with R a multiple of 16:

- ``attn(q, k, v, pq, pk)``: q, k and v (B, H, N, D), factors in fp16 and in base 2, so that scores
  are ``(q k^T / sqrt(D)) log2(e) + pq pk^T``;
- ``flash_bias_func(q, k, v, q_bias, k_bias, mask, causal, softmax_scale)``, as the authors of the
  FlashBias paper publish it: q, k and v (B, N, H, D), factors (B, N, H, R) in natural units. They
  are given in fp32, as which its forward pass multiplies them; where they get gradients in the
  dtype of q, since its backward pass compiles with no other. A bias for which that is too short is
  given as two parts of each number (`split`), three columns instead of one.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashbias_convert.attention.factors import split_columns

#: columns of factors that a tile of tensor cores takes
TILE = 16
#: what the published function is called
PUBLISHED = "flash_bias_func"


@dataclass(frozen=True)
class GivenKernel:
    """A kernel of a file.

    Attributes:
        name: of the file, and of the peer.
        module: what the file defines.
    """

    name: str
    module: ModuleType

    @classmethod
    def of(cls, file: Path) -> GivenKernel:
        """Load a file; raises ValueError for one that defines neither function."""
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "attn") and not hasattr(module, PUBLISHED):
            raise ValueError(f"{file} defines neither attn nor {PUBLISHED}")
        return cls(file.stem, module)

    def factors(
        self, phi_q: Tensor, phi_k: Tensor, dtype: torch.dtype, *, split: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Factors (B, H, N, R) of a bias as the kernel reads them. Differentiable.

        Args:
            phi_q, phi_k: the factors.
            dtype: of q, k and v.
            split: give the published kernel two parts of each number, in this dtype.
        """
        if split and not hasattr(self.module, "attn"):
            phi_q, phi_k = split_columns(phi_q, phi_k, phi_q.shape[-1], dtype)
        pair = tuple(F.pad(phi, (0, -phi.shape[-1] % TILE)) for phi in (phi_q, phi_k))
        if hasattr(self.module, "attn"):
            return (pair[0] * math.log2(math.e)).half(), pair[1].half()
        own = split or (torch.is_grad_enabled() and any(phi.requires_grad for phi in pair))
        # heads of their own: gradients of heads that share memory would be written to one place
        phi_q, phi_k = (phi.to(dtype if own else torch.float32) for phi in pair)
        return phi_q.transpose(1, 2).contiguous(), phi_k.transpose(1, 2).contiguous()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
        """softmax(q k^T / sqrt(D) + bias) v, (B, H, N, Dv), with what `factors` made."""
        if hasattr(self.module, "attn"):
            attn: Callable[..., Tensor] = self.module.attn
            return attn(q, k, v, *factors)
        published: Any = getattr(self.module, PUBLISHED)
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = published(*rows, *factors, None, False, q.shape[-1] ** -0.5)
        return out.transpose(1, 2)
