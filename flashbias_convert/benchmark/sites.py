"""One attention call: converted, with a dense bias, and without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .calls import AttentionCall, CallGroup
from .judge import AttentionReference, Judgement
from .peers import (
    FLEX,
    NO_BIAS,
    OURS,
    SDPA,
    SDPA_COMPILED,
    Flex,
    dense_mask,
    flex_attention,
    sdpa_attention,
    skips_blocks,
)
from .result import Row, SiteGroup
from .rows import Timing, failure, release, timed_row, with_ratios

OTHER_FUNCTION = Judgement(True, "another function, not compared")
Step = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to compute a call.

    Attributes:
        name: of its row.
        make: prepares it: a function without arguments that computes the call.
        refusal: why it is not measured; "" if it is.
        compiled: whether `make` compiles.
        has_bias: whether it computes the same function.
    """

    name: str
    make: Callable[[], Callable[[], Tensor]]
    refusal: str = ""
    compiled: bool = False
    has_bias: bool = True


def site_rows(
    call: AttentionCall, ours: Callable[[], Tensor], timing: Timing, *, step: Step | None = None
) -> tuple[Row, ...]:
    """Time the converted attention and its peers on one call, and compare each with float64.

    Args:
        call: the call.
        ours: computes it as the converted model does.
        timing: how.
        step: called with the name of each row before it is measured.
    """
    problem, reference = "", None
    try:
        reference = AttentionReference.of(call)
    except Exception as error:  # too large for float64: rows are still worth their times
        problem = failure(error)
        release(timing.device)

    def judge(out: Tensor) -> Judgement:
        if reference is not None:
            return reference.judge(out)
        if not bool(out.isfinite().all()):
            return Judgement(False, "not finite", "NaN or infinity in this row")
        return Judgement(True, f"not judged: {problem}")

    rows = []
    for each in contenders(call, ours, timing):
        if step is not None:
            step(each.name)
        if each.refusal:
            rows.append(Row(each.name, "not measured", reason=each.refusal))
            continue
        if each.compiled:
            torch.compiler.reset()  # what was compiled before counts against its limits
        looked = judge if each.has_bias else _another_function
        rows.append(timed_row(each.name, each.make, looked, timing))
        release(timing.device)
    return with_ratios(rows, (OURS, SDPA))


def _another_function(_: Any) -> Judgement:
    return OTHER_FUNCTION


def contenders(
    call: AttentionCall, ours: Callable[[], Tensor], timing: Timing
) -> Iterator[Contender]:
    """Every way that there is."""
    q, k, v = call.q, call.k, call.v
    off = timing.no_compile

    def sdpa(mask: Tensor | None, compiled: bool = False) -> Callable[[], Tensor]:
        attend: Any = sdpa_attention(call, mask)
        attend = torch.compile(attend, dynamic=False) if compiled else attend
        return lambda: attend(q, k, v)

    def flex() -> Callable[[], Tensor]:
        bias = dense_mask(call, with_causal=not skips_blocks(call))
        attend = flex_attention(call, bias, Flex())
        return lambda: attend(q, k, v)

    yield Contender(OURS, lambda: ours)
    yield Contender(SDPA, lambda: sdpa(dense_mask(call)))
    if call.args.cosine:  # compiled, it normalises q and k in one pass
        yield Contender(SDPA_COMPILED, lambda: sdpa(dense_mask(call), True), off, True)
    yield Contender(FLEX, flex, off, True)
    yield Contender(NO_BIAS, lambda: sdpa(None), has_bias=False)


def site_group(group: CallGroup, timing: Timing, step: Step | None = None) -> SiteGroup:
    """Measure one kind of site on the call that the model made."""
    call = group.call

    def ours() -> Tensor:
        out: Tensor = group.terms(call.q, call.k, call.v, **group.kwargs)
        return out

    def named(name: str) -> None:
        if step is not None:
            step(f"{group.sites[0]}: {name}")

    return SiteGroup(
        sites=tuple(group.sites),
        batch=call.batch,
        heads=call.q.shape[-3],
        kv_heads=call.k.shape[-3],
        n=call.q.shape[-2],
        m=call.k.shape[-2],
        head_dim=call.q.shape[-1],
        terms=call.kinds,
        rank=call.rank,
        causal=call.args.causal,
        cosine=call.args.cosine,
        rows=site_rows(call, ours, timing, step=named),
    )
