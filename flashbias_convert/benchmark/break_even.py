"""From which length on a converted attention is faster than one with a dense bias: measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..attention import PreparedBias, flashbias_attention
from ..decompose.costs import rank_bucket
from .calls import AttentionCall, CallGroup
from .peers import OURS, WITH_BIAS
from .result import BreakEven, Point
from .rows import Timing, release
from .sites import Step, site_rows
from .synthetic import fixed_n, synthetic_call

#: shortest length that is measured
SMALLEST_N = 16
#: kinds of sites that are measured
MOST_KINDS = 8
#: seconds of timed calls per row, on a card and elsewhere
BUDGET_S = {"cuda": 0.5, "cpu": 0.1}


def lengths(most: int) -> list[int]:
    """Powers of two from 16 to `most`."""
    found = []
    n = SMALLEST_N
    while n <= most:
        found.append(n)
        n *= 2
    return found


def kinds_of_sites(groups: Sequence[CallGroup]) -> list[list[CallGroup]]:
    """Groups whose attention differs in batch and length only."""
    found: dict[Hashable, list[CallGroup]] = {}
    for group in groups:
        call = group.call
        rank = None if call.rank is None else rank_bucket(call.rank)
        sizes = (call.q.shape[-3], call.k.shape[-3], call.q.shape[-1])
        key = (*sizes, call.kinds, rank, call.args.causal, call.args.cosine)
        found.setdefault(key, []).append(group)
    return list(found.values())


def break_even(
    alike: Sequence[CallGroup], most: int, timing: Timing, step: Step | None = None
) -> BreakEven:
    """Measure one kind of site at powers of two.

    The number of tokens, batch times length, is that of the site's own call: a longer sequence
    comes with fewer of them.

    Args:
        alike: from `kinds_of_sites`; the first is measured.
        most: largest length; less where there is no room for the terms.
        timing: how.
        step: called with a name before each row.
    """
    call = alike[0].call
    tokens = call.q[..., 0, :, 0].numel()
    short = replace(timing, budget_s=BUDGET_S.get(timing.device.type, BUDGET_S["cpu"]))
    points = []
    for n in lengths(most):
        batch = max(1, tokens // n)

        def named(name: str, n: int = n) -> None:
            if step is not None:
                step(f"N = {n}: {name}")

        try:
            synthetic = synthetic_call(call, n, batch)
        except torch.OutOfMemoryError:  # longer ones have no room, either
            release(timing.device)
            break
        rows = site_rows(synthetic, _ours(synthetic), short, step=named)
        points.append(Point(n, batch, rows))
    from_n, text = crossing(points)
    return BreakEven(
        sites=tuple(dict.fromkeys(name for group in alike for name in group.sites)),
        heads=call.q.shape[-3],
        head_dim=call.q.shape[-1],
        terms=call.kinds,
        rank=call.rank,
        causal=call.args.causal,
        cosine=call.args.cosine,
        fixed_n=call.q.shape[-2] if fixed_n(alike[0].terms.bias) else None,
        points=tuple(points),
        n=from_n,
        text=text,
    )


def _ours(call: AttentionCall) -> Callable[[], Tensor]:
    prepared = PreparedBias(call.bias)
    args = call.args

    def attend() -> Tensor:
        return flashbias_attention(
            call.q,
            call.k,
            call.v,
            prepared,
            scale=args.scale,
            causal=args.causal,
            query_start=args.query_start,
            cosine=args.cosine,
            score_bound=call.score_bound,
            backend=call.backend,
        )

    return attend


def crossing(points: Sequence[Point]) -> tuple[int | None, str]:
    """The smallest length from which on ours is faster than the best peer, and that in words.

    Lengths at which ours is not right, or no peer is, say nothing and are passed over.
    """
    faster: dict[int, bool] = {}
    for point in points:
        times = {row.name: row.median_ms for row in point.rows}
        ours = times.get(OURS)
        peers = [ms for name in WITH_BIAS if (ms := times.get(name)) is not None]
        if ours is not None and peers:
            faster[point.n] = ours < min(peers)
    if not faster:
        return None, "not known: nowhere was there both a right result of ours and one of a peer"
    measured = sorted(faster)
    first: int | None = None
    for n in reversed(measured):
        if not faster[n]:
            break
        first = n
    if first is None:
        elsewhere = [str(n) for n in measured if faster[n]]
        only = f", though at N = {', '.join(elsewhere)}" if elsewhere else ""
        return None, f"not faster up to N = {measured[-1]}{only}"
    if first == measured[0]:
        return first, f"faster from the smallest measured N = {first} on, up to {measured[-1]}"
    return first, f"faster from N = {first} on, up to {measured[-1]}"
