"""The same call in two processes: the same launches, and the same bits.

Run as a program, this module makes the calls and says what came of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashbias_convert.attention import flashbias_attention, launch
from flashbias_convert.attention.packing import GroupSpec
from flashbias_convert.attention.parted_plan import PartedPlan

from .cases import Inputs
from .conftest import INTERPRETED, spare_the_interpreter

ROOT = Path(__file__).resolve().parents[2]


def calls(device: torch.device) -> dict[str, tuple[Inputs, tuple[Any, ...], bool]]:
    """Inputs, terms and causality by name."""
    whole = Inputs(device, torch.float16, n=70, d=32)
    alone = Inputs(device, torch.float16, batch=(1,), n=1, m=2048, d=32)  # keys that are shared out
    return {
        "low rank": (whole, (whole.low_rank(),), False),
        "table": (whole, (whole.table(),), False),
        "alibi, decoding": (alone, (alone.alibi(),), True),
    }


def told(device: torch.device) -> dict[str, Any]:
    """Of each call: a hash of its output, and kernels, grids and settings of its launches."""
    found: dict[str, Any] = {}
    for name, (x, terms, causal) in calls(device).items():
        launches: list[dict[str, Any]] = []

        def note(
            spec: GroupSpec,
            tensors: Mapping[str, Tensor],
            options: dict[str, Any],
            seen: list[dict[str, Any]] = launches,
        ) -> None:
            own = {key: options[key] for key in ("scale", "causal", "cosine", "bounded")}
            made = launch.plan_of(spec, tensors, **own)
            assert made is not None
            plan, settings = made
            plans = (plan.first, plan.second) if isinstance(plan, PartedPlan) else (plan,)
            for each in plans:
                fixed = {n: str(v) for n, v in each.arguments().items() if v is not None}
                own = {"settings": str(settings), "options": each.options, **fixed}
                seen.append({"kernel": each.kernel.__name__, "grid": each.programs, **own})

        with launch.observed(note):
            out = flashbias_attention(
                x.q, x.k, x.v, x.bias(*terms), causal=causal, backend="triton"
            )
        assert out.isfinite().all() and out.any()
        bits = out.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = {"bits": hashlib.sha256(bits).hexdigest(), "launches": launches}
    return found


def test_two_processes_launch_alike_and_return_the_same_bits(
    kernel: str, device: torch.device
) -> None:
    found = []
    for seed in ("0", "1"):  # of Python's hashes: the order of a set must not matter
        done = subprocess.run(
            [sys.executable, "-m", __name__, device.type],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert first.keys() == {"low rank", "table", "alibi, decoding"}
    assert first == second
    assert len({own["bits"] for own in first.values()}) == 3
    assert [len(own["launches"]) for own in first.values()] == [1, 1, 2]  # the last has parts


if __name__ == "__main__":
    if INTERPRETED:
        spare_the_interpreter()
    print(json.dumps(told(torch.device(sys.argv[1]))))
