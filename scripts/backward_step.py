"""One training step of an attention call: what is trained, what is true, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention_peers import Call, Peer, peers
from attention_shapes import Shape
from bench_attention import _first_entry as first_entry
from failures import lacked_beside_others
from torch import Tensor

from flashbias_convert import ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention
from flashbias_convert.benchmark.calls import AttentionCall
from flashbias_convert.benchmark.peers import dense_mask
from flashbias_convert.benchmark.timing import allocated, measure

#: queries of the reference at a time
ROWS = 2048
#: ours, but not with the same bits every time
ATOMICS = "ours, atomics"
GRADIENTS = ("error_dq", "error_dk", "error_dv")
#: terms of a bias by the name of their tensors: the axis of queries
_QUERIES = {"phi_q": -2, "u": -1, "bias": -2, "rel_h": -2, "rel_w": -2}


@dataclass(frozen=True)
class Problem:
    """A call whose gradients are wanted.

    Attributes:
        shape: of the call.
        q, k, v: leaves, shapes (*batch, H, N, D).
        bias: its tensors are leaves that ask for gradients if it is trained.
        dout: gradient of the output.
        trained: whether gradients of the bias are wanted, too.
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    bias: ScoreBias | None
    dout: Tensor
    trained: bool

    @classmethod
    def of(cls, shape: Shape, trained: bool, dtype: torch.dtype, device: torch.device) -> Problem:
        """A shape's problem, the same numbers every time."""
        torch.manual_seed(0)
        packed = shape.inputs(dtype, device)
        q, k, v = (x.detach().requires_grad_() for x in packed)
        bias = None if shape.bias is None else shape.bias(shape, device)
        if trained and bias is not None:
            terms = tuple(term.map_tensors(_leaf) for term in bias.terms)
            bias = ScoreBias(terms, bias.num_heads)
        return cls(shape, q, k, v, bias, torch.randn_like(v), trained)

    def leaves(self) -> list[Tensor]:
        """Tensors of the bias that ask for gradients."""
        terms = () if self.bias is None else self.bias.terms
        return [x for term in terms for x in term.tensors().values() if x.requires_grad]


def _leaf(_: str, tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class Step:
    """Forward and backward pass of one peer.

    Attributes:
        forward: with gradients on, as in training.
        wanted: q, k, v and what else gets a gradient.
        dout: gradient of the output.
    """

    forward: Call
    wanted: list[Tensor]
    dout: Tensor

    def __call__(self) -> list[Tensor]:
        """The gradients."""
        return list(torch.autograd.grad(self.forward(), self.wanted, self.dout))


MakeStep = Callable[[], Step]


def steps(problem: Problem, **options: Any) -> list[tuple[Peer, MakeStep]]:
    """All peers of a problem, and what makes their steps.

    A trained bias is trained in the form that a peer takes: the dense matrix by those that read
    one, the terms by all others.

    Args:
        problem: to compute.
        options: of `attention_peers.peers`.
    """
    matrices: list[Tensor] = []

    def dense(call: AttentionCall, *, with_causal: bool = True) -> Tensor:
        with torch.no_grad():
            mask = dense_mask(call, with_causal=with_causal)
        matrices.append(mask.detach().requires_grad_(problem.trained))
        return matrices[-1]

    def step_of(peer: Peer) -> Step:
        matrices.clear()
        call = peer.make()
        wanted = [problem.q, problem.k, problem.v]
        if problem.trained and peer.has_bias:
            wanted += matrices or problem.leaves()
        matrices.clear()
        return Step(call, wanted, problem.dout)

    args = (problem.shape, problem.q, problem.k, problem.v, problem.bias)
    found = list(peers(*args, dense=dense, **options))
    found.insert(1, Peer(ATOMICS, lambda: with_atomics(problem)))
    return [(peer, lambda peer=peer: step_of(peer)) for peer in found]


def with_atomics(problem: Problem) -> Call:
    """Ours, with a backward pass that adds with atomics where it can."""
    bias = None if problem.bias is None else PreparedBias(problem.bias)
    options = {"backend": "triton", "deterministic": False, **problem.shape.options}
    return lambda: flashbias_attention(problem.q, problem.k, problem.v, bias, **options)


def truth(problem: Problem, has_bias: bool) -> list[Tensor]:
    """dq, dk and dv of the first batch entry and head in float64, (1, N, D) each.

    Queries pass in chunks: no (N, M) tensor, whatever the length.
    """
    shape, at = problem.shape, (0,) * len(problem.shape.batch)
    bias = None
    if has_bias and problem.bias is not None:
        terms = tuple(t.map_tensors(lambda _, x: x.detach()) for t in problem.bias.terms)
        bias = first_entry(ScoreBias(terms, shape.heads).select_heads([0]), len(at))
    q, k, v = (x.detach()[at][:1].double() for x in (problem.q, problem.k, problem.v))
    dout = problem.dout[at][:1].double()
    k, v = k.requires_grad_(), v.requires_grad_()
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, q.shape[-2], ROWS):
        rows = min(ROWS, q.shape[-2] - first)
        part = q.narrow(-2, first, rows).clone().requires_grad_()
        own = None if bias is None else rows_of(bias, first, rows)
        start = k.shape[-2] - q.shape[-2] + first
        options = {**shape.options, "query_start": start}
        out = flashbias_attention(part, k, v, own, backend="eager", **options)
        found = torch.autograd.grad(out, (part, k, v), dout.narrow(-2, first, rows))
        dq.append(found[0])
        dk, dv = dk + found[1], dv + found[2]
    return [torch.cat(dq, -2), dk, dv]


def rows_of(bias: ScoreBias, first: int, rows: int) -> ScoreBias:
    """The bias of some queries."""

    def cut(name: str, x: Tensor) -> Tensor:
        return x.narrow(_QUERIES[name], first, rows) if name in _QUERIES else x

    terms = []
    for term in bias.terms:
        own = {name: cut(name, x) for name, x in term.tensors().items()}
        if term.kind == "regions":
            own.setdefault("key_ids", own["ids"])
            own["ids"] = own["ids"].narrow(-1, first, rows)
        terms.append(type(term).from_state(term.static(), own))
    return ScoreBias(tuple(terms), bias.num_heads)


def errors(gradients: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """Relative errors of dq, dk and dv in the first batch entry and head."""
    found = {}
    for name, got, true in zip(GRADIENTS, gradients[:3], exact, strict=True):
        own = got[(0,) * (got.dim() - 3)][:1].double()
        found[name] = float((own - true).norm() / true.norm())
    return found


def times(step: Step, repeats: int, device: torch.device) -> dict[str, str]:
    """Milliseconds of steps and of forward passes, eager and replayed, and MiB beyond the inputs.

    A step that a CUDA graph cannot hold has no replay times; `note` says so.
    """
    eager = measure(step, device, repeats=repeats, before=allocated(device), budget_s=5.0)
    ahead = measure(step.forward, device, repeats=repeats, budget_s=5.0)
    told = {
        "call_ms": f"{eager.times.median_ms:.4f}",
        "forward_call_ms": f"{ahead.times.median_ms:.4f}",
        "peak_mib": "" if eager.peak_mib is None else f"{eager.peak_mib:.1f}",
    }
    return told if device.type != "cuda" else told | _replayed(step)


def _replayed(step: Step) -> dict[str, str]:
    """Times on the card alone: many small launches cost nothing in a graph."""
    from triton.testing import do_bench_cudagraph

    told: dict[str, str] = {}
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            quantiles = [0.2, 0.5, 0.8]
            low, middle, high = do_bench_cudagraph(step, rep=40, quantiles=quantiles)
            told = {"step_ms": f"{middle:.4f}", "p20_ms": f"{low:.4f}", "p80_ms": f"{high:.4f}"}
            told["forward_ms"] = f"{do_bench_cudagraph(step.forward, rep=40, quantiles=[0.5]):.4f}"
    except RuntimeError as problem:
        if lacked_beside_others(problem):
            raise
        if type(problem).__name__ == "AcceleratorError" and "captur" not in str(problem):
            raise
        torch.cuda.synchronize()
        told["note"] = f"no CUDA graph: {str(problem).splitlines()[0][:80]}"
    return told
