"""Damage to safetensors files: the header says what is not so, or the values are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from . import damage_json

_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "C64", "X99", "", 7)
_SHAPES: tuple[Any, ...] = (
    [], [0], [-1], [2**62, 2], [2**63], [10**30], [1.5], ["3"], None, 3, [[2]], [True], [1] * 500,
)  # fmt: skip
_OFFSETS: tuple[Any, ...] = (
    [-4, 0], [0, 4], [4, 0], [0, 2**62], [2**63, 2**64], [0], [], None, [0.0, 4.0], [1, 5],
)  # fmt: skip
Header = dict[str, Any]


def split(data: bytes) -> tuple[Header, bytes]:
    """The header and what follows it."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: Header | str, body: bytes, length: int | None = None) -> bytes:
    """A file with any header, and any word on how long it is."""
    text = header if isinstance(header, str) else json.dumps(header)
    encoded = text.encode("utf-8", "surrogatepass")
    said = len(encoded) if length is None else length
    return said.to_bytes(8, "little") + encoded + body


def _entry(rng: Random, header: Header) -> tuple[str, Header]:
    name = rng.choice([key for key in header if key != "__metadata__"])
    return name, header[name]


def header_length(rng: Random, header: Header, body: bytes) -> bytes:
    own = len(json.dumps(header))
    lengths = [0, 1, own - 1, own + 1, own + len(body), 10**6, 10**8 + 1, 2**31, 2**40, 2**63]
    return join(header, body, rng.choice([*lengths, 2**64 - 1]))


def dtype(rng: Random, header: Header, body: bytes) -> bytes:
    _entry(rng, header)[1]["dtype"] = rng.choice(_DTYPES)
    return join(header, body)


def shape(rng: Random, header: Header, body: bytes) -> bytes:
    entry = _entry(rng, header)[1]
    old = entry["shape"]
    entry["shape"] = rng.choice([*_SHAPES, old[::-1], [*old, 1], [1, *old], old[1:]])
    return join(header, body)


def dtype_and_shape(rng: Random, header: Header, body: bytes) -> bytes:
    """As many bytes as before, read as something else."""
    entry = _entry(rng, header)[1]
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    width, entry["dtype"] = rng.choice([(8, "F64"), (4, "I32"), (2, "F16"), (1, "U8"), (8, "I64")])
    entry["shape"] = [size // width]
    return join(header, body)


def offsets(rng: Random, header: Header, body: bytes) -> bytes:
    entry = _entry(rng, header)[1]
    entry["data_offsets"] = rng.choice([*_OFFSETS, [len(body), len(body) + 4]])
    return join(header, body)


def overlapping(rng: Random, header: Header, body: bytes) -> bytes:
    (_, a), (_, b) = _entry(rng, header), _entry(rng, header)
    b["data_offsets"] = a["data_offsets"]
    if rng.random() < 0.5:
        b["shape"] = a["shape"]
    return join(header, body)


def exchanged(rng: Random, header: Header, body: bytes) -> bytes:
    """Two tensors under each other's name."""
    a, b = _entry(rng, header)[0], _entry(rng, header)[0]
    header[a], header[b] = header[b], header[a]
    return join(header, body)


def renamed(rng: Random, header: Header, body: bytes) -> bytes:
    name, entry = _entry(rng, header)
    del header[name]
    new = rng.choice(
        ["", "module." + name, "\x1b[2J", "\ud800", name + "\n", "a" * 10_000, "__metadata__", "é"]
    )
    header[new] = entry
    return join(header, body)


def missing(rng: Random, header: Header, body: bytes) -> bytes:
    del header[_entry(rng, header)[0]]
    return join(header, body)


def duplicate(rng: Random, header: Header, body: bytes) -> bytes:
    """The same key twice, which JSON allows and Python resolves to the last."""
    name, entry = _entry(rng, header)
    other = rng.choice([entry, _entry(rng, header)[1], {"dtype": "F32", "shape": [1]}, None])
    text = json.dumps(header)
    first = f"{json.dumps(name)}: {json.dumps(other)}, "
    if rng.random() < 0.3:
        first = '"__metadata__": {"format": "pt"}, ' * 2
    return join("{" + first + text[1:], body)


def metadata(rng: Random, header: Header, body: bytes) -> bytes:
    header["__metadata__"] = rng.choice([None, 3, [], {"a": 1}, {"a": None}, {"a": {}}, "x", {}])
    return join(header, body)


def nested(rng: Random, header: Header, body: bytes) -> bytes:
    depth = rng.choice([100, 100_000])
    return join('{"a":' * depth + "1" + "}" * depth, body)


def any_header(rng: Random, header: Header, body: bytes) -> bytes:
    return join(json.dumps(damage_json.damaged(rng, header)), body)


def no_numbers(rng: Random, header: Header, body: bytes) -> bytes:
    """NaN, infinities and other bit patterns in the place of weights."""
    data = bytearray(body)
    pattern = rng.choice(["0000c07f", "0000807f", "000080ff", "ffff7f7f", "01000000", "0000a07f"])
    _, entry = _entry(rng, header)
    start, end = entry["data_offsets"]
    count = rng.choice([1, (end - start) // 4])
    at = start + 4 * rng.randrange(max(1, (end - start) // 4 - count + 1))
    data[at : at + 4 * count] = bytes.fromhex(pattern) * count
    return join(header, bytes(data))


DAMAGES: dict[str, Callable[[Random, Header, bytes], bytes]] = {
    f.__name__: f
    for f in (
        header_length, dtype, shape, dtype_and_shape, offsets, overlapping, exchanged, renamed,
        missing, duplicate, metadata, nested, any_header, no_numbers,
    )
}  # fmt: skip
