"""Work items: 64 or 128 queries of a head, and the tiles of keys that they see, in Gluon."""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import rules
from .tiles import ROWS, get

LOG2E = gl.constexpr(rules.LOG2E)


@gluon.jit
def work_item(work, sizes, FORM: gl.constexpr):
    """First query, batch entry, head, number of tiles, and the tile behind the last key.

    Blocks of a head are side by side, to share its keys. Causal: the longest ones of `near` heads
    come first, then shorter ones of the same, since the cache holds keys of as many.
    """
    N, H, entries, near, _works, _many, reach = sizes
    BM: gl.constexpr = get(FORM, "GROUPS") * ROWS
    BN: gl.constexpr = get(FORM, "KEYS")
    blocks = gl.cdiv(N, BM)
    if get(FORM, "CAUSAL"):
        section = work // (near * blocks)
        rest = work - section * (near * blocks)
        heads = gl.minimum(near, entries - section * near)
        turn = rest // heads
        first = (blocks - 1 - turn) * BM
        entry = section * near + rest - turn * heads
        tiles = gl.cdiv(first + BM, BN)
    else:
        entry = work // blocks
        first = (work - entry * blocks) * BM
        tiles = gl.cdiv(N, BN)
    b = entry // H
    h = entry - b * H
    last = tiles
    if get(FORM, "REACH"):
        # Of keys so far away from a query no weight is left: no score is larger than the product of
        # the largest lengths, so that theirs are less than 2^-40 of that of a query's own key.
        slopes_ptr, lengths_ptr, scale = reach
        slope = gl.load(slopes_ptr + h) * LOG2E
        size = gl.sqrt(gl.load(lengths_ptr + h)) * gl.sqrt(gl.load(lengths_ptr + H + h))
        far = (2.001 * scale * LOG2E * size + 41.0) / slope
        far = gl.where((slope > 0.0) & (far < 1e9), far, 1e9).to(gl.int32)
        tiles = last - gl.maximum(first - far, 0) // BN
    return first, b, h, tiles, last


@gluon.jit
def first_key(t, last, FORM: gl.constexpr):
    """First key of the t-th tile in the order of the steps."""
    if get(FORM, "CAUSAL"):
        return (last - 1 - t) * get(FORM, "KEYS")
    else:
        return t * get(FORM, "KEYS")


@gluon.constexpr_function
def first_width(form, w):
    """Columns of the first tile of which warpgroup w sees some."""
    w, keys, groups = int(getattr(w, "value", w)), get(form, "KEYS"), get(form, "GROUPS")
    if not get(form, "CAUSAL") or groups * 64 % keys or keys <= 64:
        return keys
    return w * 64 % keys + 64


@gluon.constexpr_function
def unseen_tiles(form, w):
    """First tiles of a causal block of queries of which warpgroup w sees nothing."""
    w, keys, groups = int(getattr(w, "value", w)), get(form, "KEYS"), get(form, "GROUPS")
    if not get(form, "CAUSAL") or groups * 64 % keys:
        return 0
    return groups * 64 // keys - 1 - w * 64 // keys
