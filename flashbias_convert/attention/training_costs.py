"""Which way of training a call is fastest, from measurements in `training_costs.csv`.

`scripts/measure_training_costs.py` makes the table: forward plus backward. Forms are named by what
the time of a way depends on: dtype, columns that factors take in it, whether terms are trained.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import Literal

import torch

from ..cost_tables import CLASSES, Curve, read_costs

#: the kernels that give the same bits every time, those with atomics, torch's attention
Way = Literal["triton", "atomics", "sdpa"]
WAYS: tuple[Way, ...] = ("triton", "atomics", "sdpa")
#: (number of pairs of a query and a key from which on it is not so any more, way), ascending; the
#: last one holds for all that are longer
Spans = tuple[tuple[int, Way], ...]

TABLE = files(__package__) / "training_costs.csv"
#: Columns of a call with a key bias and nothing else.
KEY_BIAS = -1


def form_name(way: str, dtype: str, columns: int, *, trained: bool, causal: bool) -> str:
    """What the table calls a way of computing a kind of call.

    Args:
        way: one of `WAYS`.
        dtype: of q, k and v, such as "bfloat16".
        columns: factor columns in this way, padded for the kernels; or `KEY_BIAS`.
        trained: whether the bias has gradients.
        causal: queries see no later keys.
    """
    name = f"{way}, {dtype}, " + ("key bias" if columns == KEY_BIAS else f"{columns} columns")
    return name + (", trained" if trained else "") + (", causal" if causal else "")


def card_class(device: torch.device) -> str | None:
    """The class of cards that a device is of; None if nobody knows it."""
    if device.type != "cuda":
        return device.type
    return CLASSES.get(torch.cuda.get_device_capability(device))


def is_measured(device: torch.device) -> bool:
    """Whether the table has measurements of such a card."""
    return bool(_table(card_class(device)))


def fastest(
    device: torch.device,
    dtype: str,
    head_size: int,
    kernel_columns: int,
    sdpa_columns: int | None,
    trained: bool,
    causal: bool,
) -> Spans:
    """The fastest way by the number of pairs of a query and a key.

    A length counts as the nearest measured one, a head size as the next, and so do columns of
    torch's attention: what is not measured favours the kernels.

    Args:
        device: where the call runs.
        dtype, trained, causal: see `form_name`.
        head_size: of q and k or of v, the larger.
        kernel_columns: padded factor columns of the kernels, or `KEY_BIAS`.
        sdpa_columns: those that torch's attention would get, or `KEY_BIAS`; None if it cannot
            serve the call.

    Returns:
        Nothing if the kernels were not measured for such a call.
    """
    sizes = _table(card_class(device))
    size = min((d for d in sizes if d >= head_size), default=None)
    if size is None:
        return ()
    curves: dict[Way, Curve | None] = {}
    for way in WAYS:
        columns = sdpa_columns if way == "sdpa" else kernel_columns
        if columns is None:
            continue
        more = range(columns, 257) if way == "sdpa" and columns > 0 else (columns,)
        names = (form_name(way, dtype, c, trained=trained, causal=causal) for c in more)
        curves[way] = next((sizes[size][name] for name in names if name in sizes[size]), None)
    return _spans({way: dict(curve) for way, curve in curves.items() if curve})


# torch.compile takes the answers for constants; see `backends.device_problem`
is_measured._dynamo_marked_constant = True  # type: ignore[attr-defined]
fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _spans(costs: dict[Way, dict[int, float]]) -> Spans:
    """Where each way is the cheapest; limits lie in the middle, on the scale of logarithms."""
    if "triton" not in costs:
        return ()
    lengths = sorted(costs["triton"])
    found: list[tuple[int, Way]] = []
    for n, longer in zip(lengths, [*lengths[1:], None], strict=True):
        best = min(costs, key=lambda way: costs[way].get(n, math.inf))
        if found and found[-1][1] == best:
            found.pop()
        found.append((0 if longer is None else n * longer, best))
    return tuple(found)


@cache
def _table(of_class: str | None) -> dict[int, dict[str, Curve]]:
    return {} if of_class is None else read_costs(TABLE.read_text("utf-8"), of_class)
