"""What may happen to a damaged file: it works and equals, or one line says why not."""

from __future__ import annotations

import contextlib
import hashlib
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashbias_convert import load_model
from flashbias_convert.checkpoint import Conversion, restore_checkpoint
from flashbias_convert.errors import FlashBiasError

from . import tiny

#: longer lines are no messages
LONGEST = 2500
SECONDS = 60
#: how much more address space, and how much more memory, a damaged file may cost
ADDRESSES, MEMORY = 3 * 2**30, 200 * 2**20


def snapshot(folder: Path) -> dict[str, str]:
    """Everything below a folder: name -> what it is, with a digest of files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder" if path.is_dir() else "special"
    return found


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fails on calls that take too much time or memory; memory that is asked for is not there."""

    def too_long(*_: Any) -> None:
        raise AssertionError(f"this took more than {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    previous = signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ADDRESSES, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    grown = _memory("VmHWM") - before
    assert grown < MEMORY, f"memory grew by {grown / 2**20:.0f} MB"


def _memory(name: str) -> int:
    """A line of the process's own account of its memory, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def refused(error: FlashBiasError) -> str:
    """The outcome, after a look at the message."""
    text = str(error)
    assert text and text.isprintable() and len(text) <= LONGEST, repr(text[:3000])
    return f"refused: {type(error).__name__}"


def try_to_convert(path: Path, root: Path, arch: str | None) -> str:
    """Convert `path`, which lies in `root`; says how it ended, and raises AssertionError."""
    before = snapshot(root)
    try:
        with bounded():
            done = tiny.convert(path, arch=arch)
    except FlashBiasError as error:
        assert snapshot(root) == before, "something was written"
        return refused(error)
    after = snapshot(root)
    assert done.output is not None and done.plan_file is not None
    news = {str(p.relative_to(root)) for p in (done.output, done.plan_file, *_inside(done.output))}
    assert {k: v for k, v in after.items() if k not in news} == before, "other files changed"
    _check_conversion(done)
    failed = done.plan.with_status("failed")
    return "converted in part" if failed else "converted"


def _inside(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def _check_conversion(done: Conversion) -> None:
    """The output holds every tensor of the input, and computes what the model in memory does."""
    assert done.output is not None
    found = _weights_of(done.output)
    kept = [_bits(t) for name, t in found.items() if ".score_bias." not in name]
    originals = sorted(_bits(t) for t in _weights_of(done.source).values())
    assert sorted(kept) == originals, "tensors were changed"
    with bounded():
        loaded = load_model(done.output)
    assert_same(_run(loaded), _run(done.model))


def _weights_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by the readers of others."""
    from safetensors.torch import load_file

    if path.is_dir():
        files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("[!.]*.[pb][ti][hn]"))
        return {k: v for file in files for k, v in _weights_of(file).items()}
    if path.name.endswith(".index.json"):
        return _weights_of(path.parent)
    with path.open("rb") as file:
        is_torch = file.read(2) in (b"PK", b"\x80\x02")
    if not is_torch:
        return load_file(path)
    import argparse

    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    return {k: v for k, v in content["state_dict"].items() if isinstance(v, Tensor)}


def try_to_load(path: Path, root: Path) -> str:
    """Load `path`, which lies in `root`; says how it ended, and raises AssertionError."""
    before = snapshot(root)
    try:
        with bounded():
            model = load_model(path)
    except FlashBiasError as error:
        return refused(error)
    finally:
        assert snapshot(root) == before, "something was written"
    state = model.state_dict()
    for key, stored in _weights_of(path).items():
        if not key.endswith(".made_from"):  # rows that say nothing of these weights are made anew
            assert_same(state[key], stored.to(state[key].dtype))  # half precision is widened
    try:
        _run(model)
    except ValueError as error:  # terms of another window than the architecture in the plan has
        assert "the call has" in str(error), error
        return "loaded, and refused to compute"
    return "loaded"


def try_to_restore(path: Path, root: Path) -> str:
    """Restore `path`, which lies in `root`; says how it ended, and raises AssertionError."""
    before = snapshot(root)
    try:
        with bounded():
            done = restore_checkpoint(path)
    except FlashBiasError as error:
        assert snapshot(root) == before, "something was written"
        return refused(error)
    news = {str(p.relative_to(root)) for p in (done.output, *_inside(done.output))}
    assert {k: v for k, v in snapshot(root).items() if k not in news} == before
    found, stored = _weights_of(done.output), _weights_of(path).values()
    assert len(found) == done.tensors
    assert {_bits(t) for t in found.values()} <= {_bits(t) for t in stored}, "tensors were changed"
    return "restored"


@torch.no_grad()
def _run(model: Any) -> Tensor:
    """The output for an image of the size that the file says, if that is a sane one."""
    side = model.patch_embed.img_size[0]
    dtype = model.patch_embed.proj.weight.dtype
    out: Tensor = model(tiny.images(side).to(dtype)) if side <= 64 else torch.empty(0)
    return out


def assert_same(a: Tensor, b: Tensor) -> None:
    """Bit for bit, but for the bits of NaN."""
    assert a.shape == b.shape and a.dtype == b.dtype
    assert bool(((a == b) | (a.isnan() & b.isnan())).all()), "the outputs differ"


def _bits(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return str(tensor.dtype), tuple(tensor.shape), digest
