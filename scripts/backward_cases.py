"""Kernels of the backward pass, kinds of calls, and the launch settings worth trying for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from backward_step import Step
from measure_training_costs import Job as Call

from flashbias_convert.attention.tuning import LaunchSettings, backward_settings

KERNELS = ("queries", "keys", "all")
#: fp32 numbers of sums and tiles that a thread may hold, and the fewest that make it worth while
MOST_HELD, LEAST_HELD = 224, 40


@dataclass(frozen=True)
class Case:
    """A kernel for one kind of call.

    Attributes:
        kernel: see `tuning.backward_settings`.
        d, columns: head size, and factor columns.
        trained: whether factors get gradients.
    """

    kernel: str
    d: int
    columns: int
    trained: bool

    def present(self, n: int) -> LaunchSettings:
        """What is launched now."""
        return backward_settings(
            self.kernel,
            rows=n,
            d=self.d,
            dv=self.d,
            columns=self.columns,
            half=True,
            trained=self.trained,
        )

    def held(self, settings: LaunchSettings) -> float:
        """Numbers of fp32 that a thread holds at once, about: sums, scores and their gradients."""
        m, n, wide = settings.block_m, settings.block_n, self.d
        extra = self.columns if self.trained else 0
        sums = {"queries": m * (wide + extra), "keys": n * (2 * wide + extra)}
        sums["all"] = sums["keys"] + m * wide  # a share of those of queries
        return (sums[self.kernel] + 2 * m * n) / (32 * settings.num_warps)

    def candidates(self) -> list[LaunchSettings]:
        """Settings worth trying."""
        blocks, depths = (32, 64, 128), (3,)  # two were never better, where both were measured
        found = [
            LaunchSettings(m, n, warps, depth, registers)
            for m, n, warps, depth in itertools.product(blocks, blocks, (4, 8), depths)
            # so that three or four programs share a multiprocessor, or two of twice the size
            for registers in ((None, 128) if warps == 8 else (None, 128, 168))
        ]
        # a wide product of a tensor core has 64 rows of what it adds to
        rows = {"queries": "block_m", "keys": "block_n", "all": "block_n"}[self.kernel]
        return [
            s for s in found
            if getattr(s, rows) >= 16 * s.num_warps and LEAST_HELD <= self.held(s) <= MOST_HELD
        ]  # fmt: skip

    def step(self, n: int, scores: int, device: str) -> Step:
        """A training step in which this kernel makes the gradients."""
        way = "atomics" if self.kernel == "all" else "triton"
        call = Call(self.d, n, way, "bfloat16", self.columns, self.trained, False, scores, device)
        whole = call.step()
        q, k, v, *factors = whole.wanted
        wanted = {"queries": [q, *factors[:1]], "keys": [k, v, *factors[1:]]}
        for tensor in whole.wanted:
            tensor.requires_grad_(
                self.kernel == "all" or any(tensor is w for w in wanted[self.kernel])
            )
        return Step(whole.forward, wanted.get(self.kernel, whole.wanted), whole.dout)
