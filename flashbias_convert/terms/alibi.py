"""ALiBi: a slope per head times the distance between two integer positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Term, joint_shape, pinned_tensor, require_integer, require_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class Alibi(Term):
    """Adds ``slopes[h] * (pos_k[j] - pos_q[i])``, or ``-slopes[h] * |pos_k[j] - pos_q[i]|``.

    Positions stay integers to the end: rounded to fp16 they are exact only to 2,048, in bf16 to
    256. (Press et al., 2022; FlashBias, Example 3.4.)

    Attributes:
        slopes: fp32, shape (H,), or (*batch, H).
        pos_q: integers, shape (*batch, N); default query_start, query_start + 1, ...
        pos_k: integers, shape (*batch, M); default 0, 1, ...
        symmetric: use minus the absolute distance, for encoders.
    """

    kind: ClassVar[str] = "alibi"
    head_dims: ClassVar[dict[str, int]] = {"slopes": -1}

    slopes: Tensor = pinned_tensor()
    pos_q: Tensor | None = pinned_tensor(default=None)
    pos_k: Tensor | None = pinned_tensor(default=None)
    symmetric: bool = False

    def __post_init__(self) -> None:
        require_shape("slopes", self.slopes, 1, "(*batch, H)")
        for name in ("pos_q", "pos_k"):
            positions = getattr(self, name)
            if positions is not None:
                length = "N" if name == "pos_q" else "M"
                require_shape(name, positions, 1, f"(*batch, {length})")
                require_integer(name, positions)

    def sizes(self) -> list[tuple[str, int, str]]:
        found = [("pos_q", self.pos_q, "queries"), ("pos_k", self.pos_k, "keys")]
        return [(name, p.shape[-1], axis) for name, p, axis in found if p is not None]

    def distance(self, n: int, m: int, query_start: int) -> Tensor:
        """Integers pos_k[j] - pos_q[i], shape (*batch, n, m)."""
        device = self.slopes.device
        pos_q, pos_k = self.pos_q, self.pos_k
        if pos_q is None:
            pos_q = torch.arange(query_start, query_start + n, device=device)
        if pos_k is None:
            pos_k = torch.arange(m, device=device)
        return pos_k.long()[..., None, :] - pos_q.long()[..., :, None]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        distance = self.distance(n, m, query_start)
        if self.symmetric:
            distance = -distance.abs()
        return self.slopes.to(dtype)[..., :, None, None] * distance[..., None, :, :].to(dtype)

    def batch_shape(self) -> tuple[int, ...]:
        shapes = [tuple(self.slopes.shape[:-1]), self._row_scale_batch()]
        shapes += [tuple(p.shape[:-1]) for p in (self.pos_q, self.pos_k) if p is not None]
        return joint_shape(*shapes)
