"""What tests of calls in compiled graphs share."""

from __future__ import annotations

from typing import Any

import torch

from flashbias_convert import ScoreBias
from flashbias_convert.attention.flags import flags_of
from flashbias_convert.attention.packing import pack

from .cases import Inputs

#: memory on the chip that a program may use on an H200
HOPPER_BYTES = 227 * 1024
#: of calls of few queries
SIZES: dict[str, Any] = {"n": 3, "m": 101, "d": 24, "dv": 16, "heads": 2}


def arguments_of(x: Inputs, bias: ScoreBias | None, **options: Any) -> tuple[Any, ...]:
    """Of the operator."""
    packed = pack(bias or ScoreBias((), x.heads), half=x.dtype != torch.float32)
    flags = flags_of(causal=options.get("causal", False), cosine=options.get("cosine", False))
    given = [options.get(name) for name in ("head_scale", "key_mask", "starts", "gate")]
    scale, start = options.get("scale", x.q.shape[-1] ** -0.5), x.m - x.n
    start = 0 if given[2] is not None else start
    return (
        x.q, x.k, x.v, packed.tensors, packed.spec, scale, *given[:2], start, given[2], flags,
        given[3],
    )  # fmt: skip
