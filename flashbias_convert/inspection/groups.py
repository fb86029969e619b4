"""Sites that are planned together: those of one owner, and those of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from ..options import DecomposeOptions
from ..plan import SitePlan
from ..selection import Choice
from .finding import Match
from .planning import plan_site

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup

Progress = Callable[[int, int, str], None]
#: how modules call the number of their heads
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")


def plan_together(
    matches: Sequence[Match],
    options: DecomposeOptions,
    chosen: Choice,
    progress: Progress | None,
    group: ProcessGroup,
) -> list[SitePlan]:
    """Every process plans some of the sites, and gets the plans of the others."""
    from ..parallel import spread

    def plan(match: Match) -> SitePlan:
        made = plan_site(match, options, chosen.reason_against(match.names))
        return replace(made, bias=None if made.bias is None else made.bias.to("cpu"))

    def done(count: int) -> None:
        if progress is not None:
            at = min(count * group.size(), len(matches))
            progress(at, len(matches), matches[at - 1].site.name)

    costs = [expected_work(match.site.module) for match in matches]
    plans = spread([partial(plan, match) for match in matches], group, done=done, costs=costs)
    devices = [next((p.device for p in m.site.module.parameters()), None) for m in matches]
    return [
        replace(made, bias=None if made.bias is None else made.bias.to(device))
        for made, device in zip(plans, devices, strict=True)
    ]


def expected_work(module: nn.Module) -> float:
    """About how much a decomposition of its bias is: H N M sqrt(N M), as an SVD takes it.

    N M is the size of the largest matrix of integers that the module has, which is the index of
    its relative positions; 1 where there is none. What is not known costs others some waiting.
    """
    sizes = [b.numel() for b in module.buffers(recurse=False) if not b.is_floating_point()]
    heads = (getattr(module, name, None) for name in _HEADS)
    count = next((value for value in heads if isinstance(value, int)), 1)
    return float(count * max(sizes, default=1) ** 1.5)


def together(owners: Sequence[nn.Module | None], plans: Sequence[SitePlan]) -> list[SitePlan]:
    """Leave the sites of an owner alone unless all of them can be patched.

    They share what their owner makes: while one needs the dense bias, it is made for all.

    Args:
        owners: `shared_owner` of each site.
        plans: one per site.
    """
    lacking: dict[nn.Module, str] = {}
    for owner, plan in zip(owners, plans, strict=True):
        if owner is not None and plan.status != "patched":
            lacking.setdefault(owner, plan.name)
    done = []
    for owner, plan in zip(owners, plans, strict=True):
        culprit = lacking.get(owner) if owner is not None else None
        if culprit is not None and plan.status == "patched":
            reason = f"shares its bias with {culprit!r}, which is not converted"
            plan = replace(
                plan, status="left alone", reason=reason, spec=None, bias=None, modules=None
            )
        done.append(plan)
    return done
