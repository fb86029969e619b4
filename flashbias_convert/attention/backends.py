"""Which backend runs a call, and why not a faster one."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from ..terms import KeyBias, LowRank, ScoreBias
from .arguments import AttentionArguments
from .prepared import PreparedBias, settled
from .sdpa import columns_alone
from .traced_bias import TracedBias
from .training_costs import KEY_BIAS, Spans, Way, fastest, is_measured
from .training_packing import training_columns

Backend = Literal["auto", "triton", "sdpa", "eager"]
BACKENDS: tuple[str, ...] = get_args(Backend)

#: Largest head size of the kernel.
MAX_HEAD_SIZE = 256
#: Oldest card with bf16 tensor cores.
MIN_CAPABILITY = (8, 0)


class BackendFallbackWarning(UserWarning):
    """A slower backend runs because the fast one cannot."""


def device_problem(device: torch.device) -> str | None:
    """Why the Triton kernel cannot run on `device`, or None if it can."""
    return _device_problem(device)


# torch.compile takes the answer for a constant and does not look inside; the decorator for this,
# torch.compiler.assume_constant_result, would import the whole compiler
device_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _device_problem(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "the tensors are on the CPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"device type {device.type} is not supported"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, 8.0 is needed"
    return None


def wants_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: PreparedBias | TracedBias | None,
    args: AttentionArguments,
) -> bool:
    """Whether a backward pass may follow."""
    if not torch.is_grad_enabled():
        return False
    scale = isinstance(args.scale, Tensor) and args.scale.requires_grad
    scale = scale or (args.gate is not None and args.gate.requires_grad)
    asks = q.requires_grad or k.requires_grad or v.requires_grad or scale
    return asks or (bias is not None and bias.requires_grad)


def call_problem(q: Tensor, v: Tensor, bias: PreparedBias | TracedBias | None) -> str | None:
    """Why the Triton kernels cannot run this call, or None if they can. Reads no values."""
    if q.dtype == torch.float64:
        return "there is no fp64 kernel"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "transforms of torch.func do not know the kernels"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_SIZE:
        return f"head sizes above {MAX_HEAD_SIZE} are not supported"
    return None if bias is None else bias.problem(q.dtype != torch.float32)


def training_way(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: PreparedBias | TracedBias | None,
    args: AttentionArguments,
    *,
    backend: str,
    deterministic: bool,
) -> Way:
    """How a call that the kernels can run is trained. Reads shapes only.

    Torch's attention adds gradients with atomics, too. So where bits count, the kernels run; else,
    with "auto", what was measured to be fastest on such a card. Where nothing was measured of such
    a call, kernels without atomics run if other calls were, among which atomics hardly ever pay.
    """
    if deterministic or torch.are_deterministic_algorithms_enabled():
        return "triton"
    if backend != "auto" or not is_measured(q.device):
        return "atomics"
    spans = _spans_of(q, k, v, None if bias is None else bias.bias, args)
    for below, way in spans[:-1]:
        if q.shape[-2] * k.shape[-2] < below:
            return way
    return spans[-1][1] if spans else "triton"


def _spans_of(
    q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None, args: AttentionArguments
) -> Spans:
    """What was measured of such calls; nothing of terms other than factors or a key bias."""
    terms = () if bias is None else bias.terms
    gated = any(term.heads is not None or term.row_scale is not None for term in terms)
    if gated or not all(isinstance(term, LowRank | KeyBias) for term in terms):
        return ()
    size, columns = max(q.shape[-1], v.shape[-1]), 0
    if bias is not None and terms:
        columns = training_columns(bias, half=q.dtype != torch.float32)
    only_columns = columns_alone(q, bias, args)
    if args.cosine or isinstance(args.scale, Tensor) or q.shape[-3] != k.shape[-3]:
        only_columns = None  # not measured in torch's attention
    if any(isinstance(term, KeyBias) for term in terms):
        if len(terms) > 1:
            return ()
        columns, only_columns = KEY_BIAS, None if only_columns is None else KEY_BIAS
    if torch.compiler.is_compiling():
        size, columns = settled(size), settled(columns)
        only_columns = None if only_columns is None else settled(only_columns)
    trained = bias is not None and bias.requires_grad
    dtype = str(q.dtype).removeprefix("torch.")
    return fastest(q.device, dtype, size, columns, only_columns, trained, args.causal)


def warn_once(reason: str) -> None:
    """Say once per process why a slower backend runs; of compiled code when it is traced."""
    if torch.compiler.is_compiling():
        _warn_while_tracing(reason)
    else:
        _warn(reason)


def _warn_while_tracing(reason: str) -> None:
    _warn(reason)


# torch.compile runs it while it traces; see `_device_problem`
_warn_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"flashbias_convert falls back to torch's attention: {reason}",
        BackendFallbackWarning,
        stacklevel=4,
    )
