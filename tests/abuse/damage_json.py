"""Damage to a JSON value: one or more of its parts become something else."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

#: what nobody expects
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 10**6, 10**9, 10**12, 2**31, 2**63, -(2**63), 10**40,
    0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "..", "../../etc/passwd", "0",
    "é\ud800", "\x1b[31mred\n\nlines", "a" * 10_000, "hf-hub:someone/something", "os.system",
    [], {}, [[]], [None], {"": {}}, [10**12, 10**12], {"__class__": "x"},
)  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += _paths(inner, (*path, key))
    return found


def damaged(rng: Random, value: Any) -> Any:
    """A copy with one to three changes: replaced, removed, doubled, renamed or swapped parts."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        paths = _paths(value)
        # by depth first, so that a few hundred numbers at the bottom are not all that is hit
        depth = rng.choice(sorted({len(path) for path in paths}))
        path = rng.choice([p for p in paths if len(p) == depth])
        if not path:
            if rng.random() < 0.2:
                return rng.choice(NASTY)
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        _change(rng, parent, path[-1])
    return value


def _change(rng: Random, parent: Any, key: Any) -> None:
    how = rng.random()
    old = parent[key]
    if how < 0.2:
        del parent[key]
    elif how < 0.3 and isinstance(old, int) and not isinstance(old, bool):
        parent[key] = old + rng.choice([-1, 1])
    elif how < 0.4 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(rng.choice(parent)))
    elif how < 0.4:
        parent[f"{key}x"] = parent.pop(key)
    elif how < 0.5:
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], old
    else:
        parent[key] = copy.deepcopy(rng.choice(NASTY))
