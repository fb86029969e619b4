"""Damage that knows nothing of a format: bits, blocks, lengths."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

ByteDamage = Callable[[Random, bytearray], bytearray]


def truncated(rng: Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data))]


def flipped(rng: Random, data: bytearray) -> bytearray:
    """One to eight bits; half of the time near the ends, where headers are."""
    for _ in range(rng.randint(1, 8)):
        span = min(len(data), 6000) if rng.random() < 0.5 else len(data)
        at = rng.randrange(span)
        at = len(data) - 1 - at if rng.random() < 0.3 else at
        data[at] ^= 1 << rng.randrange(8)
    return data


def overwritten(rng: Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    length = min(rng.choice([1, 8, 100, 5000]), len(data) - start)
    filler = rng.choice([b"\0", b"\xff", b"{", None])
    data[start : start + length] = rng.randbytes(length) if filler is None else filler * length
    return data


def cut_out(rng: Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    del data[start : start + rng.choice([1, 7, 64, 4096])]
    return data


def doubled(rng: Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    block = data[start : start + rng.choice([1, 64, 4096])]
    data[start:start] = block
    return data


def swapped(rng: Random, data: bytearray) -> bytearray:
    length = rng.choice([1, 8, 512])
    a, b = sorted(rng.randrange(max(1, len(data) - length)) for _ in range(2))
    if b - a >= length:
        data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
    return data


def longer(rng: Random, data: bytearray) -> bytearray:
    return data + rng.randbytes(rng.choice([1, 8, 5000]))


DAMAGES: dict[str, ByteDamage] = {
    f.__name__: f for f in (truncated, flipped, overwritten, cut_out, doubled, swapped, longer)
}
