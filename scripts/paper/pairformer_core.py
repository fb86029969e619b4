"""Triangle attention without its projections: ready q, k, v, bias, padding mask and gate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from pairformer_table import Trial
from pairformer_ways import has_kernels, padded
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbias_convert import Dense, ScoreBias, flashbias_attention
from flashbias_convert.attention import PreparedBias
from flashbias_convert.benchmark.peers import Flex

DENSE = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
FLOORS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
#: rows of triangles, and queries of each, whose errors are looked at
ROWS, QUERIES = 6, 128
#: share of the keys that is padding
PADDING = 1 / 16

#: a call, and whether bias and mask are in its result
Calls = dict[str, tuple[Callable[[], Tensor], bool]]


class Core:
    """Inputs of one length, random.

    Args:
        n: tokens; each of N rows has N queries and keys.
        heads, head_dim: H and D.
        compiles: FlexAttention is there, and gates of peers are one kernel.
    """

    def __init__(
        self, n: int, heads: int, head_dim: int, device: str, dtype: torch.dtype, compiles: bool
    ) -> None:
        draw = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            made = torch.randn(*shape, generator=draw, device=device, dtype=torch.float32)
            return made.to(dtype)

        self.q, self.k, self.v, self.gate = (random(n, heads, n, head_dim) for _ in range(4))
        self.bias = random(heads, n, n)
        self.mask = torch.arange(n, device=device) < n - int(n * PADDING)
        self.masked = padded(self.bias.masked_fill(~self.mask, float("-inf")))
        self.compiles = compiles

    def errors(self, call: Callable[[], Tensor], gated: bool) -> dict[str, float]:
        """Of some queries of some rows, against float64; and what the plain formula loses."""
        n = len(self.q)
        rows = torch.linspace(0, n - 1, min(n, ROWS), device=self.q.device).long()
        queries = torch.linspace(0, n - 1, min(n, QUERIES), device=self.q.device).long()

        def formula(dtype: torch.dtype) -> Tensor:
            q, k, v, gate = (x[rows].to(dtype) for x in (self.q, self.k, self.v, self.gate))
            scores = q[:, :, queries] * q.shape[-1] ** -0.5 @ k.mT
            out = (scores + self.masked[:, queries].to(dtype)).softmax(-1) @ v
            return out * gate[:, :, queries].sigmoid() if gated else out

        truth = formula(torch.float64)

        def away(out: Tensor) -> float:
            return float((out.double() - truth).norm() / truth.norm())

        made = call()[rows][:, :, queries]
        return {"error": away(made), "library_error": away(formula(self.q.dtype))}

    def _gated(self, attend: Callable[[], Tensor], gated: bool) -> Callable[[], Tensor]:
        """With a gate of its own kernel, or two where nothing is compiled."""
        if not gated:
            return attend
        multiply = _multiply()[self.compiles]
        return lambda: multiply(attend(), self.gate)

    def calls(self, gated: bool) -> Calls:
        """Ways by name, ours first; each gets bias and mask in the form that it takes."""
        bias = PreparedBias(ScoreBias((Dense(bias=self.bias),), len(self.bias)))

        def ours(**more: Any) -> Callable[[], Tensor]:
            return lambda: flashbias_attention(self.q, self.k, self.v, bias, **more)

        gate = {"gate": self.gate} if gated else {}
        found: Calls = {"ours": (ours(key_mask=self.mask, **gate), True)}
        if gated:
            apart = self._gated(ours(key_mask=self.mask), True)
            found["ours, gate apart"] = (apart, True)
        found["ours, no mask"] = (ours(**gate), False)
        peers: dict[str, tuple[Callable[[], Tensor], bool]] = {}
        for name, backend in DENSE.items():
            peers[f"SDPA {name}"] = (functools.partial(self._sdpa, backend, True), True)
        if self.compiles:
            peers["FlexAttention"] = (self._flex(), True)
        for name, backend in FLOORS.items():
            peers[f"SDPA {name}, no bias"] = (functools.partial(self._sdpa, backend, False), False)
        if has_kernels():
            peers["cuEquivariance"] = (self._cuequivariance(), True)
        return found | {n: (self._gated(call, gated), whole) for n, (call, whole) in peers.items()}

    def _sdpa(self, backend: SDPBackend, biased: bool) -> Tensor:
        mask = self.masked.expand(len(self.q), -1, -1, -1) if biased else None
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(self.q, self.k, self.v, mask)

    def _flex(self) -> Callable[[], Tensor]:
        run, scale = Flex(), self.q.shape[-1] ** -0.5
        return lambda: run.attend(self.q, self.k, self.v, self.masked, None, None, scale)

    def _cuequivariance(self) -> Callable[[], Tensor]:
        """Bias fp32 (1, 1, H, N, N), mask bool (1, rows, 1, 1, N), made beforehand."""
        n = len(self.q)
        wide = functools.cache(lambda: self.bias.float()[None, None])
        mask = self.mask.expand(1, n, 1, 1, n).contiguous()

        def attend() -> Tensor:
            from cuequivariance_torch import triangle_attention

            q, k, v = (x[None] for x in (self.q, self.k, self.v))
            scale = q.shape[-1] ** -0.5
            out: Tensor = triangle_attention(q, k, v, wide(), mask=mask, scale=scale)[0]
            return out

        return attend


@functools.cache
def _multiply() -> dict[bool, Callable[[Tensor, Tensor], Tensor]]:
    def multiply(out: Tensor, gate: Tensor) -> Tensor:
        return out * gate.sigmoid()

    return {False: multiply, True: torch.compile(multiply, dynamic=False)}


@torch.no_grad()
def core(table: Any, made: Core) -> None:
    """All ways with a gate, and without it."""
    for gated in (True, False):
        component = "triangle attention, core" + ("" if gated else ", no gate")
        for name, (call, whole) in made.calls(gated).items():
            errors = functools.partial(made.errors, call, gated) if whole else None
            table.time(lambda c=call, e=errors: Trial(c, e, exact=True, replays=True), way=name,
                       component=component, n=len(made.q), mode="inference")  # fmt: skip
