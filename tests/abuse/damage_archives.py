"""Damage to files of torch.save: archives, and the pickles in them."""

from __future__ import annotations

import functools
import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from .tiny import training_content, weights

Records = dict[str, bytes]
_BIG = (10**6, 10**9, 10**11, 2**31, 2**62, 2**63, 2**80, -1, -(2**40))
_GLOBALS = (
    "torch FloatStorage", "torch ComplexDoubleStorage", "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_qtensor",
    "torch._utils _rebuild_parameter", "torch Tensor", "torch Size", "torch float64", "os system",
    "builtins bytearray", "builtins eval", "collections Counter", "nowhere nothing", "torch load",
)  # fmt: skip
MEGABYTES = 300


def records(data: bytes) -> Records:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(found: Records, compressed: Callable[[str], bool] = lambda name: False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in found.items():
            how = zipfile.ZIP_DEFLATED if compressed(name) else zipfile.ZIP_STORED
            archive.writestr(name, content, how)
    return out.getvalue()


def _saved(content: Any, rng: Random | None = None) -> bytes:
    out = io.BytesIO()
    old = rng is not None and rng.random() < 0.3
    torch.save(content, out, _use_new_zipfile_serialization=not old)
    return out.getvalue()


def _pickle_name(found: Records) -> str:
    return next(name for name in found if name.endswith("data.pkl"))


# -- the archive ---------------------------------------------------------------------------


def record_lost(rng: Random, found: Records) -> bytes:
    del found[rng.choice(list(found))]
    return archive_of(found)


def record_of_other_size(rng: Random, found: Records) -> bytes:
    name = rng.choice(list(found))
    found[name] = rng.choice([found[name][: len(found[name]) // 2], found[name] * 2, b""])
    return archive_of(found)


def record_renamed(rng: Random, found: Records) -> bytes:
    name = rng.choice(list(found))
    new = rng.choice(["../../" + name, "/" + name, name + "x", "x", name.upper()])
    return archive_of({new if key == name else key: value for key, value in found.items()})


def records_exchanged(rng: Random, found: Records) -> bytes:
    a, b = rng.choice(list(found)), rng.choice(list(found))
    found[a], found[b] = found[b], found[a]
    return archive_of(found)


def packed_again(rng: Random, found: Records) -> bytes:
    """The same content, some of it compressed: whole, but not as torch writes it."""
    share = rng.choice([0.3, 1.0])
    return archive_of(found, lambda name: rng.random() < share)


@functools.cache
def _zeros() -> bytes:
    return bytes(MEGABYTES * 2**20)


@functools.cache
def _bomb(kind: str) -> bytes:
    found = records(_saved(training_content()))
    name = _pickle_name(found) if kind == "pickle" else next(n for n in found if "/data/" in n)
    if kind == "many":
        return archive_of({**found, "archive/more": _zeros()}, lambda key: key.endswith("more"))
    return archive_of({**found, name: found[name] + _zeros()}, lambda key: key == name)


def bomb(rng: Random, found: Records) -> bytes:
    """A few hundred kilobytes that unpack to hundreds of megabytes."""
    return _bomb(rng.choice(["pickle", "tensor", "many"]))


# -- the pickle ----------------------------------------------------------------------------


def pickle_bits(rng: Random, found: Records) -> bytes:
    name = _pickle_name(found)
    data = bytearray(found[name])
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return archive_of({**found, name: bytes(data)})


def _long(value: int) -> bytes:
    encoded = pickle.encode_long(value)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def _replaced(rng: Random, found: Records, prefix: str, new: Callable[[], bytes]) -> bytes:
    """The archive with one random operation of the pickle replaced."""
    name = _pickle_name(found)
    data = found[name]
    starts = [(op.name, at) for op, _, at in pickletools.genops(data) if at is not None]
    ends = [at for _, at in starts[1:]] + [len(data)]
    spans = [(*start, end) for start, end in zip(starts, ends, strict=True)]
    _, start, end = rng.choice([span for span in spans if span[0].startswith(prefix)])
    return archive_of({**found, name: data[:start] + new() + data[end:]})


def pickle_numbers(rng: Random, found: Records) -> bytes:
    """Sizes, strides and offsets that no memory holds."""
    return _replaced(rng, found, "BININT", lambda: _long(rng.choice(_BIG)))


def pickle_texts(rng: Random, found: Records) -> bytes:
    new = ["", "cuda", "cuda:7", "meta", "storage", "module", "0", "999", "é\ud800", "\n"]
    return _replaced(rng, found, "BINUNICODE", lambda: _text(rng.choice([*new, "x" * 9999])))


def pickle_globals(rng: Random, found: Records) -> bytes:
    def new() -> bytes:
        module, name = rng.choice(_GLOBALS).split()
        return f"c{module}\n{name}\n".encode()

    return _replaced(rng, found, "GLOBAL", new)


def pickle_by_hand(rng: Random, found: Records) -> bytes:
    """Few bytes that ask for much: memory, depth, or walks without end."""
    inner: Any = {"x": 1}
    for _ in range(40):
        inner = {str(i): inner for i in range(40)}
    loop: dict[str, Any] = {}
    loop["state_dict"] = loop
    number = _long(10**11)
    crafted = rng.choice(
        [
            pickle.dumps({"state_dict": inner, "model": inner}, protocol=2),
            pickle.dumps(loop, protocol=2),
            b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
            b"\x80\x02" + b"}X\x01\0\0\0m" * 5000 + b"}" + b"s" * 5000 + b".",
            b"\x80\x02cbuiltins\nbytearray\n" + number + b"\x85R.",
            b"\x80\x02c__builtin__\nbytearray\n" + number + b"\x85R.",
            b"\x80\x02ctorch\nTensor\n" + number + b"\x85R.",
            b"\x80\x02" + b"(" * 100_000 + b".",
            b"\x80\x02N." * 10,
            b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
            b"",
        ]
    )
    if rng.random() < 0.3:
        return crafted or b"\x80"
    return archive_of({**found, _pickle_name(found): crafted})


def odd_tensors(rng: Random, found: Records) -> bytes:
    """Tensors that have no values, or more of them than bytes."""
    state = weights()
    name = rng.choice([key for key in state if state[key].dim() == 2])
    shape = state[name].shape
    odd = rng.choice(
        [
            torch.empty(shape, device="meta"),
            torch.zeros(shape).to_sparse(),
            torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.qint8),
            torch.zeros(1).expand(shape),
            torch.zeros(1).expand(10**6, 10**6),
            torch.zeros(shape, dtype=torch.complex64),
            torch.zeros(shape, dtype=torch.bool),
            torch.zeros(shape, dtype=torch.float8_e4m3fn),
            torch.zeros(shape, dtype=torch.int64),
            torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            torch.nn.Parameter(torch.zeros(shape)),
            3.0,
        ]
    )
    content = {**training_content(), "state_dict": {**state, name: odd}}
    return _saved(content, rng)


class _Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def code(rng: Random, found: Records, trap: Path) -> bytes:
    """A pickle that makes the file `trap` when its code runs."""
    call = rng.choice(
        [
            _Call(os.system, f"touch {trap}"),
            _Call(Path.touch, trap),
            _Call(eval, f"open({str(trap)!r}, 'w')"),
            _Call(exec, f"open({str(trap)!r}, 'w')"),
            _Call(os.mkdir, str(trap)),
            _Call(torch.save, {}, str(trap)),
            _Call(io.open, str(trap), "w"),
        ]
    )
    content = rng.choice(
        [
            {**training_content(), "extra": call},
            {**training_content(), "args": call},
            {"state_dict": {**weights(), "x": call}},
            {"model": weights(), 3: [call]},
            call,
        ]
    )
    if rng.random() < 0.2:
        return pickle.dumps(content, protocol=2)
    return _saved(content, rng)


DAMAGES: dict[str, Callable[[Random, Records], bytes]] = {
    f.__name__: f
    for f in (
        record_lost, record_of_other_size, record_renamed, records_exchanged, packed_again, bomb,
        pickle_bits, pickle_numbers, pickle_texts, pickle_globals, pickle_by_hand, odd_tensors,
    )
}  # fmt: skip
