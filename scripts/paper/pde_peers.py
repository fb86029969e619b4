"""Other ways to compute the attention of the PDE solver, and whether they compute it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from given_kernel import GivenKernel
from torch import Tensor

from flashbias_convert.models.pde_transformer import Attend, Distances, FusedAttend

OURS, ANY_ORDER, NO_BIAS = "flashbias", "flashbias, any order", "SDPA without bias"
SDPA, FLEX, FLEX_DENSE = "SDPA, dense bias", "FlexAttention, distances", "FlexAttention, dense bias"


def without_bias(
    q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Tensor | None
) -> Tensor:
    """What attention costs at all; it computes something else."""
    return F.scaled_dot_product_attention(q, k, v)


class Squares:
    """Squared distances as a matrix, made once for all layers of a call."""

    def __init__(self) -> None:
        self._made: tuple[Distances, Tensor] | None = None

    def of(self, distances: Distances) -> Tensor:
        """(B, 1, N, N), fp32: differences, squared and added up, as distances of points would be
        rounded away in |x|^2 + |y|^2 - 2 x.y."""
        if self._made is None or self._made[0] is not distances:
            self._made = None  # two matrices may not fit
            squares: Tensor | float = 0.0
            for x in distances.points.unbind(-1):
                away = x[:, None, :, None] - x[:, None, None, :]
                squares = squares + away * away
            assert isinstance(squares, Tensor)
            self._made = distances, squares
        return self._made[1]

    def bias(self, distances: Distances, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """-w |x_i - x_j|^2 as a matrix (B, H, N, N)."""
        with torch.autocast(weight.device.type, enabled=False):
            return (-weight[..., None] * self.of(distances)).to(dtype)


def sdpa() -> Attend:
    """torch's attention with the matrix, whose gradient is a matrix, too."""
    squares = Squares()

    def attend(
        q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Tensor | None
    ) -> Tensor:
        assert weight is not None
        mask = squares.bias(distances, weight, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask)

    return attend


def flex(dense: bool) -> Attend:
    """FlexAttention, compiled: with the matrix, or with distances worked out from coordinates."""
    compiled: Any = torch.compile(_flex_dense if dense else _flex_distances, dynamic=False)
    squares = Squares()

    def attend(
        q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Tensor | None
    ) -> Tensor:
        assert weight is not None
        if dense:
            return compiled(q, k, v, squares.bias(distances, weight, q.dtype))
        return compiled(q, k, v, distances.points.transpose(1, 2).contiguous(), weight.contiguous())

    return attend


def _flex_dense(q: Tensor, k: Tensor, v: Tensor, matrix: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, lambda s, b, h, i, j: s + matrix[b, h, i, j])


def _flex_distances(q: Tensor, k: Tensor, v: Tensor, points: Tensor, weight: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    def nearer(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        dx = points[b, 0, i] - points[b, 0, j]
        dy = points[b, 1, i] - points[b, 1, j]
        dz = points[b, 2, i] - points[b, 2, j]
        return score - weight[b, h, i] * (dx * dx + dy * dy + dz * dz)

    return flex_attention(q, k, v, nearer)


def given(file: Path) -> Attend:
    """A kernel given by the user, see `given_kernel`."""
    kernel = GivenKernel.of(file)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Tensor | None
    ) -> Tensor:
        assert weight is not None
        phi_q = distances.phi_q * weight[..., None]
        phi_k = distances.phi_k.expand(*weight.shape[:2], -1, -1)
        return kernel.attend(q, k, v, kernel.factors(phi_q, phi_k, q.dtype, split=True))

    return attend


#: of the weights that `errors` draws
LARGEST_WEIGHT = 64.0

#: by name, what makes an `Attend`
PEERS: dict[str, Callable[[], Attend]] = {
    OURS: FusedAttend,
    # gradients are added with atomics, which "auto" takes nowhere that weights are on factors
    ANY_ORDER: lambda: FusedAttend(backend="triton", deterministic=False),
    NO_BIAS: lambda: without_bias,
    SDPA: sdpa,
    FLEX: lambda: flex(False),
    FLEX_DENSE: lambda: flex(True),
}


def plain(q: Tensor, k: Tensor, v: Tensor, distances: Distances, weight: Tensor | None) -> Tensor:
    """The formula, every step in the dtype of q."""
    assert weight is not None
    points = distances.points.to(torch.promote_types(q.dtype, torch.float32))
    squares = (points[:, :, None] - points[:, None]).square().sum(-1)
    bias = -weight[..., None] * squares[:, None]
    scores = (q @ k.mT) * q.shape[-1] ** -0.5 + bias.to(q.dtype)
    return scores.softmax(-1) @ v


def errors(
    attend: Attend, points: Tensor, heads: int, size: int, dtype: torch.dtype
) -> list[float]:
    """Relative errors of the output and of the gradients of q and of the weights.

    Against the formula in float64; NaN for gradients that a peer does not have.

    Args:
        attend: what is judged.
        points: shape (1, N, 3).
        heads, size: of q, k and v, which are drawn.
        dtype: of q, k and v.
    """
    generator = torch.Generator(points.device).manual_seed(0)
    shape = (1, heads, points.shape[1], size)
    draw = {"generator": generator, "device": points.device}
    q, k, v, dout = (torch.randn(*shape, **draw).to(dtype) for _ in range(4))
    weight = torch.rand(*shape[:3], **draw) * LARGEST_WEIGHT
    wide = tuple(x.double() for x in (q, k, v, weight))
    truth = [_output(plain, wide, points.double()),
             *_gradients(plain, wide, points.double(), dout.double())]  # fmt: skip
    found = [_output(attend, (q, k, v, weight), points)]
    try:
        found += _gradients(attend, (q, k, v, weight), points, dout)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # kernels of others fail in ways of their own
        print(f"no gradients: {str(problem).splitlines()[0][:120]}", flush=True)
    known = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=False)]
    return known + [float("nan")] * (3 - len(known))


@torch.no_grad()
def _output(attend: Attend, inputs: tuple[Tensor, ...], points: Tensor) -> Tensor:
    q, k, v, weight = inputs
    return attend(q, k, v, Distances.of(points), weight)


def _gradients(
    attend: Attend, inputs: tuple[Tensor, ...], points: Tensor, dout: Tensor
) -> list[Tensor]:
    """Of q and of the weights; zeros where there are none."""
    q, k, v, weight = (x.detach().requires_grad_() for x in inputs)
    out = attend(q, k, v, Distances.of(points), weight)
    found = torch.autograd.grad(out, (q, weight), dout, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g
            for g, x in zip(found, (q, weight), strict=True)]  # fmt: skip
