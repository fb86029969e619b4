"""The calls that `sanitize_kernel.py` runs under a tool, in groups, and how one of them is run.

A tool slows a kernel down a hundred times, so the calls are small.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashbias_convert import Axial, LowRank, ScoreBias  # noqa: E402
from flashbias_convert.attention import flashbias_attention, launch  # noqa: E402
from flashbias_convert.attention.hopper import plan, rules  # noqa: E402
from flashbias_convert.attention.tuning import LaunchSettings  # noqa: E402
from tests.attention.cases import BIASES, Inputs  # noqa: E402

HALF = ("float16", "bfloat16")
DTYPES = (*HALF, "float32")
#: N and D that no block divides
SIZES = ((40, 16), (150, 32), (150, 64))
#: N and D of windows, which blocks divide, as SwinV2 has them, and what is added there
WINDOWS = ((256, 24), (256, 48), (64, 48))
OF_WINDOWS = ("none", "low_rank", "low_rank-unsplit-ranks", "regions", "heads-differ")
#: windows that are trained, too
TRAINED_WINDOWS = (WINDOWS[0], WINDOWS[2])
#: what else is added to cosine attention
OF_COSINE = ("none", "low_rank", "key_bias", "alibi", "relative_table", "pairs", "dense", "all")
#: what is added under a causal mask
OF_CAUSAL = (
    "none", "low_rank", "key_bias", "alibi", "alibi-symmetric-rows", "relative_table", "dense",
    "lookup", "axial",
)  # fmt: skip
#: for the kernel for Hopper: five tiles of keys, the last of which has 68, and two with 4 queries
#: in the last block
LONG, SHORT = 580, 132
#: entries that have more blocks of `SHORT` than a Hopper has multiprocessors: where blocks are
#: computed again, some programs have several
MANY = 40
#: what has another form of the kernel for Hopper where it is `SHORT`
OTHER_IF_SHORT = ("alibi", "key_bias")
#: multiprocessors where the same is to happen in small calls
FEW = 3


@dataclass(frozen=True)
class Call:
    """One call of the operator, as many queries as keys.

    Attributes:
        bias: its kind, one of `KINDS`.
        entries: of the batch in a program of the kernel that two can share.
        trained: with gradients of q, k, v and everything else that can have one, twice: as they
            are by default, and with atomics where those are allowed.
        hopper: may be served by the kernel for Hopper, however short.
        multiprocessors: that the kernel for Hopper believes the card to have; 0: those it has.
    """

    dtype: str
    bias: str
    n: int
    d: int
    batch: int = 2
    causal: bool = False
    cosine: bool = False
    entries: int = 1
    trained: bool = False
    hopper: bool = False
    multiprocessors: int = 0


# -- kinds of bias beside those of the operator's tests --------------------------------------


def _wide_axial(x: Inputs) -> ScoreBias:
    """More rows and columns than factors have, and than one walk over the keys adds up."""
    rel_h, rel_w = (x.normal(x.heads, x.n, size).to(x.dtype) for size in (150, 120))
    term = Axial(rel_h=rel_h, rel_w=rel_w, y=x.integers(150, x.m), x=x.integers(120, x.m))
    return x.bias(term)


def _widest(x: Inputs) -> ScoreBias:
    """As many columns as the kernel for Hopper has room for."""
    return x.bias(x.low_rank(8192 // x.q.shape[-1], split=0))


def _late_stretch(x: Inputs) -> ScoreBias:
    """Some of the last keys are far above all others: what saw them is computed again."""
    phi_k = torch.zeros(x.heads, x.m, 1, device=x.device)
    phi_k[:, -min(40, x.m) :] = 300 / 16
    phi_q = torch.full((x.heads, x.n, 1), 16.0, device=x.device)
    return x.bias(LowRank(phi_q=phi_q, phi_k=phi_k, split=0))


def _late_key(x: Inputs) -> None:
    """No bias, but the last query all but equals the last key: its block is computed again."""
    x.k[..., -1, :] = 40 * x.q[..., -1, :].sign()


#: what is added to the scores, by name
KINDS: dict[str, Callable[[Inputs], ScoreBias | None]] = {
    **BIASES,
    "axial-wide": _wide_axial,
    "low_rank-unsplit": lambda x: x.bias(x.low_rank(split=0)),
    "low_rank-batch": lambda x: x.bias(x.low_rank(batch=(2,), split=0)),
    "low_rank-widest": _widest,
    "late-stretch": _late_stretch,
    "late-key": _late_key,
    "pairs": lambda x: x.bias(x.pairs(10), x.low_rank(2)),
    "distances": lambda x: x.bias(x.distances(1)),
    "distances-falling": lambda x: x.bias(x.distances(-1)),
}


# -- groups ----------------------------------------------------------------------------------


def _of_terms() -> list[Call]:
    """Every kind without gradients, and a dense one with two entries of the batch a program."""
    kinds = (*BIASES, "pairs")
    usual = [Call(t, name, *size) for size, t, name in product(SIZES, DTYPES, kinds)]
    return [*usual, *[Call(t, "dense", *SIZES[1], entries=2) for t in HALF]]


def _of_cosine() -> list[Call]:
    """Cosine attention, with a scale for each head, without gradients and with them."""
    found = [Call(t, name, *SIZES[1]) for t, name in product(DTYPES, OF_COSINE)]
    found += [Call(t, x, *SIZES[1], causal=True) for t, x in product(DTYPES, ("none", "alibi"))]
    found += [Call(t, x, *size) for size, t, x in product(TRAINED_WINDOWS, DTYPES, OF_WINDOWS)]
    both = [replace(call, trained=trained) for trained in (False, True) for call in found]
    both += [Call(t, name, *WINDOWS[1]) for t, name in product(DTYPES, OF_WINDOWS)]
    return [replace(call, cosine=True) for call in both]


def _of_training() -> list[Call]:
    """Every kind with gradients of its terms; regions have none but those of their row scale."""
    kinds = (*BIASES, "axial-wide")
    found = [Call(t, name, *size) for size, t, name in product(SIZES, DTYPES, kinds)]
    found += [Call(t, x, *SIZES[2], causal=True) for t, x in product(DTYPES, OF_CAUSAL)]
    return [replace(call, trained=True) for call in found]


def _of_hopper() -> list[Call]:
    """What the kernel for Hopper serves, or may come to serve."""
    factors = ("low_rank", "low_rank-unsplit", "low_rank-batch", "low_rank-widest", "late-stretch")
    distances = ("distances", "distances-falling")
    usual = ("none", "late-key", "alibi", "key_bias", "relative_table", *distances)
    found = []
    for d, t in product((64, 128), HALF):
        found += [Call(t, name, LONG, d) for name in (*usual, *factors)]
        found += [Call(t, x, LONG, d, causal=True) for x in (*usual, "low_rank", "late-stretch")]
        short = ("none", "low_rank", "alibi", "key_bias", "relative_table", *distances)
        found += [Call(t, x, SHORT, d, causal=c) for x, c in product(short, (False, True))]
        found += [Call(t, "late-key", SHORT, d, batch=MANY, causal=c) for c in (False, True)]
    return [replace(call, hopper=True) for call in found]


#: what can be chosen
GROUPS: dict[str, Callable[[], list[Call]]] = {
    "terms": _of_terms,
    "cosine": _of_cosine,
    "trained": _of_training,
    "hopper": _of_hopper,
}


def calls_of(group: str, tool: str) -> list[Call]:
    """Those of a group under a tool."""
    calls = GROUPS[group]()
    return _for_races(calls) if (group, tool) == ("hopper", "racecheck") else calls


def _for_races(calls: list[Call]) -> list[Call]:
    """Every form of the kernel for Hopper, with a batch no larger than it must be.

    Racecheck takes time for each access of shared memory. Long calls go around the rings of tiles;
    short ones are left out but where their form is another one, and so are those with many blocks.
    Programs have several of these where they are computed again, as the card is said to be small.
    """
    wanted = [call for call in calls if call.n == LONG or call.bias in OTHER_IF_SHORT]
    return [
        replace(
            call,
            batch=2 if call.bias == "low_rank-batch" else 1,
            multiprocessors=FEW if call.bias.startswith("late") else 0,
        )
        for call in wanted
    ]


# -- running one -----------------------------------------------------------------------------


def run(call: Call, device: torch.device, backend: str = "triton") -> bool:
    """Make a call, and its gradients if it is trained.

    Returns:
        Whether the kernel for Hopper served it.

    Raises:
        RuntimeError: a result that is not finite, or the kernel for Hopper gave up.
    """
    dtype = getattr(torch, call.dtype)
    x = Inputs(device, dtype, batch=(call.batch,), n=call.n, d=call.d)
    bias = KINDS[call.bias](x)
    options: dict[str, Any] = {"causal": call.causal, "backend": backend}
    if call.cosine:
        options |= {"cosine": True, "scale": torch.full((x.heads,), 5.0, device=device)}
    settings = LaunchSettings(32, 32, 4, 2, entries=call.entries)
    with launch.forced(settings) if call.entries > 1 else nullcontext():
        if call.trained:
            return _train(call, x, bias, options)
        with _open_to_all(call.multiprocessors) if call.hopper else nullcontext([]) as plans:
            _check(call, flashbias_attention(x.q, x.k, x.v, bias, **options))
    return any("hopper" in module for module in plans)


def _train(call: Call, x: Inputs, bias: ScoreBias | None, options: dict[str, Any]) -> bool:
    """Gradients of everything, in both ways; those with atomics are no concern of Hopper's."""
    bias = None if bias is None else _asking(bias)
    given = [x.q, x.k, x.v, *_tensors(bias), *[options[n] for n in ("scale",) if n in options]]
    leaves = [t.requires_grad_() for t in given if t.is_floating_point()]
    for deterministic in (True, False):
        out = flashbias_attention(x.q, x.k, x.v, bias, deterministic=deterministic, **options)
        # a sum would have gradients of ones, all of them in one place of memory
        found = torch.autograd.grad(out, leaves, x.normal(*out.shape).to(out.dtype))
        _check(call, out, *found)
    return False


def _asking(bias: ScoreBias) -> ScoreBias:
    """The same bias with tensors of its own, that may ask for gradients."""
    terms = tuple(term.map_tensors(lambda _, t: t.detach().clone()) for term in bias.terms)
    return dataclasses.replace(bias, terms=terms)


def _tensors(bias: ScoreBias | None) -> list[Tensor]:
    return [] if bias is None else [t for term in bias.terms for t in term.tensors().values()]


def _check(call: Call, *results: Tensor) -> None:
    if results[0].is_cuda:
        torch.cuda.synchronize()
    if not all(bool(result.isfinite().all()) for result in results):
        raise RuntimeError(f"{call}: a result is not finite")


@contextmanager
def _open_to_all(multiprocessors: int = 0) -> Iterator[list[str]]:
    """The kernel for Hopper serves calls of any length inside; yields modules of all plans, later.

    Args:
        multiprocessors: see `Call`.

    Raises:
        RuntimeError: it could not, and the usual kernel took its place.
    """
    plans: list[str] = []
    known = plan.multiprocessors_of
    with (
        mock.patch.object(plan, "multiprocessors_of", lambda x: multiprocessors or known(x)),
        mock.patch.object(rules, "SHORTEST", dict.fromkeys(rules.SHORTEST, 1)),
        mock.patch.object(rules, "FEWEST_SCORES", 1),
        mock.patch.object(rules, "FEWEST_OF_ONE_PASS", 1),
        mock.patch.object(rules, "REACH_FROM", LONG),
        mock.patch.object(launch, "_PLANS", {}),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        yield plans
        plans += [type(made[0]).__module__ for made in launch._PLANS.values() if made]
    given_up = [str(w.message) for w in told if "Hopper" in str(w.message)]
    if given_up:
        raise RuntimeError(given_up[0])
