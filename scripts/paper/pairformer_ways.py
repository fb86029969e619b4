"""Ways to attend with a pair bias, and what they are made from. A way is a function of a call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from flashbias_convert import Dense, LowRank, ScoreBias, flashbias_attention
from flashbias_convert.attention import PreparedBias
from flashbias_convert.benchmark.peers import Flex
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.last_layers import solved
from flashbias_convert.decompose.neural_samples import Sample, mean_loss, squared_size
from flashbias_convert.decompose.randomised import quick_factors

#: what `projected_pairs` asks a site for
SITE = SimpleNamespace(score_bias=SimpleNamespace(backend="auto"))
#: width of the hidden layers of factor networks
HIDDEN = 256


@dataclass(frozen=True)
class Call:
    """One attention call.

    Attributes:
        q, k, v: (rows, H, N, D).
        bias: makes the dense bias (H, N, N), in the dtype of q; ways without it do not ask.
        gate: (rows, H, N, D), before its sigmoid; None where nothing is gated.
        features: makes what factor networks see of the tokens, (N, C).
        projected: makes the bias as a converted site does; where it is None, as the others do.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Callable[[], Tensor]
    gate: Tensor | None = None
    features: Callable[[], Tensor] | None = None
    projected: Callable[[], Tensor] | None = None

    def of_a_site(self) -> Tensor:
        """The bias as a converted site makes it."""
        return (self.projected or self.bias)()

    def gated(self, out: Tensor) -> Tensor:
        """An output times the sigmoid of its gate."""
        return out if self.gate is None else out * self.gate.sigmoid()


#: -> (rows, H, N, D), gated
Way = Callable[[Call], Tensor]


def library(call: Call) -> Tensor:
    """As OpenFold and its followers do without a kernel: scores of some rows, then the next."""
    q, k, v, bias = call.q, call.k, call.v, call.bias()
    rows = 512 if q.shape[-2] <= 384 else 128
    parts = []
    for at in range(0, len(q), rows):
        some = slice(at, at + rows)
        scores = q[some] * q.shape[-1] ** -0.5 @ k[some].mT
        parts.append((scores + bias).softmax(-1) @ v[some])
    return call.gated(torch.cat(parts))


def padded(bias: Tensor) -> Tensor:
    """The bias with aligned rows of neighbours, or torch's kernels do not take it as it is.

    A projection of pairs has the heads of a cell beside each other.
    """
    n, wide = bias.shape[-1], -(-bias.shape[-1] // 16) * 16
    return F.pad(bias.contiguous(), (0, wide - n))[..., :n]


def sdpa(call: Call) -> Tensor:
    """torch's attention, with the backend that it chooses."""
    mask = padded(call.bias()).expand(len(call.q), -1, -1, -1)
    return call.gated(F.scaled_dot_product_attention(call.q, call.k, call.v, mask))


def flex() -> Way:
    # past the usual limit of shapes it would run uncompiled, which is another algorithm
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    run = Flex()

    def attend(call: Call) -> Tensor:
        q, scale = call.q, call.q.shape[-1] ** -0.5
        bias = call.bias().contiguous()
        return call.gated(run.attend(q, call.k, call.v, bias, None, None, scale))

    return attend


def cuequivariance(call: Call) -> Tensor:
    """NVIDIA's kernel for triangles: q (1, rows, H, N, D), bias fp32 (1, 1, H, N, N).

    Raises:
        ImportError: its kernels are not there.
    """
    from cuequivariance_torch import triangle_attention

    tensors = (x[None] for x in (call.q, call.k, call.v))
    wide = call.bias().float()[None, None]
    return call.gated(triangle_attention(*tensors, wide, scale=call.q.shape[-1] ** -0.5)[0])


def _ours(call: Call, bias: ScoreBias | PreparedBias | None) -> Tensor:
    return flashbias_attention(call.q, call.k, call.v, bias, gate=call.gate)


def without_bias(call: Call) -> Tensor:
    """Ours, of another function: no bias is made or added."""
    return _ours(call, None)


def dense(call: Call) -> Tensor:
    """Ours, exact; the gate is in the kernel."""
    bias = call.of_a_site()
    return _ours(call, ScoreBias((Dense(bias=bias),), len(bias)))


def factors(rank: int) -> Way:
    """Ours, with factors from a randomised SVD in each call; no gradient reaches the bias."""

    def attend(call: Call) -> Tensor:
        bias = call.of_a_site()
        return _ours(call, ScoreBias((quick_factors(bias, rank),), len(bias)))

    return attend


def kept(bias: Tensor, rank: int) -> Way:
    """Ours, with factors that were made once of this bias, which calls then do not make."""
    terms: tuple[LowRank, ...] = (quick_factors(bias, rank),)
    return of_terms(ScoreBias(terms, len(bias)))


def of_terms(bias: ScoreBias) -> Way:
    """Ours, with terms that are there already."""
    prepared = PreparedBias(bias)
    return lambda call: _ours(call, prepared)


def networks(made: FactorNetworks) -> Way:
    """Ours, with factors that networks make of the tokens in each call."""

    def attend(call: Call) -> Tensor:
        assert call.features is not None
        x = call.features()
        return _ours(call, ScoreBias((made.make(x_q=x, x_k=x),), made.heads))

    return attend


@torch.no_grad()
def fitted(samples: list[Sample], judge: Sample, rank: int, hidden: int = HIDDEN) -> FactorNetworks:
    """Networks whose last layers are a regression, in closed form; the hidden ones are random.

    Nothing is trained: hidden layers of random weights, then least squares and an SVD
    (`decompose/last_layers.py`), once per penalty; the one that is best on `judge` is taken.

    Args:
        samples: tokens of some structures and their biases.
        judge: another structure.
        rank: R.
        hidden: width of the hidden layers.
    """
    heads, count = judge.bias.shape[-3], judge.x_q.shape[-1]
    made = FactorNetworks(count, count, heads, rank, hidden)
    made.initialise(torch.Generator().manual_seed(0))
    x = torch.cat([sample.x_q for sample in samples]).cpu()
    made.phi_q.standardise(x)
    made.phi_k.standardise(x)
    size = torch.stack([squared_size(s, "centred").double() for s in samples]).mean(0)
    size = torch.where(size > 0, size, torch.ones_like(size))
    made.gain.copy_(size.sqrt().cpu())
    made = made.to(judge.bias.device)
    found = [{n: t.clone() for n, t in w.items()} for w in solved(made, samples, centred=True)]
    losses = []
    for weights in found:
        made.load_state_dict(weights, strict=False)
        losses.append(mean_loss(made, [judge], "centred", size))
    made.load_state_dict(found[losses.index(min(losses))], strict=False)
    return made


def has_kernels() -> bool:
    """Whether cuEquivariance can be imported."""
    return importlib.util.find_spec("cuequivariance_torch") is not None


def exact_ways(compiles: bool = True) -> dict[str, Way]:
    """What takes any bias as it is, by name.

    Args:
        compiles: FlexAttention, too, which has to be compiled for each shape.
    """
    ways = {"library": library, "SDPA": sdpa, "ours, dense": dense}
    if compiles:
        ways["FlexAttention"] = flex()
    if has_kernels():
        ways["cuEquivariance"] = cuequivariance
    return ways
