"""Archives that are not as torch writes them: read right, or not at all."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import set_crc32_options

from flashbias_convert.checkpoint import pickles as reading
from flashbias_convert.checkpoint import read_checkpoint
from flashbias_convert.errors import CheckpointError

from .test_read import WEIGHTS, assert_equal

#: the first compresses to almost nothing, so that the second lies where the first would end
TENSORS = {"a": torch.zeros(1000), "b": torch.randn(5000)}


def saved(path: Path, content: Any = None) -> Path:
    torch.save(TENSORS if content is None else content, path)
    return path


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compressed: str = "") -> Path:
    """The archive with other contents, and with the records whose names end so compressed."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            pack = bool(compressed) and name.endswith(compressed)
            how = zipfile.ZIP_DEFLATED if pack else zipfile.ZIP_STORED
            archive.writestr(name, change(name, content), how)
    return path


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of torch.load maps the file."""
    calls: list[bool] = []
    real = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["mmap"])
        return real(*args, **kwargs)

    monkeypatch.setattr(reading.torch, "load", load)
    return calls


def test_an_archive_of_torch_is_mapped(tmp_path: Path, mapped: list[bool]) -> None:
    assert_equal(read_checkpoint(saved(tmp_path / "x.pth")).tensors, TENSORS)
    assert mapped == [True]


@pytest.mark.parametrize("compressed", ["data/0", "data.pkl", "0"])
def test_a_compressed_record_is_read_right(
    tmp_path: Path, mapped: list[bool], compressed: str
) -> None:
    """A map would show the compressed bytes, and what follows them, as numbers."""
    path = rewritten(saved(tmp_path / "x.pth"), lambda name, data: data, compressed)
    assert_equal(read_checkpoint(path).tensors, TENSORS)
    assert mapped == [False]


def test_views_and_empty_tensors_are_mapped(tmp_path: Path, mapped: list[bool]) -> None:
    whole = torch.randn(4, 6)
    views = {"a": whole, "b": whole.T, "c": whole[1:3, ::2], "d": torch.empty(0, 3)}
    assert_equal(read_checkpoint(saved(tmp_path / "x.pth", views)).tensors, views)
    assert mapped == [True]


def test_an_archive_without_checksums_is_read(tmp_path: Path) -> None:
    set_crc32_options(False)
    try:
        path = saved(tmp_path / "x.pth")
    finally:
        set_crc32_options(True)
    assert_equal(read_checkpoint(path).tensors, TENSORS)


@pytest.mark.parametrize(
    "change", [lambda data: data[:-4], lambda data: data + data, lambda data: b""]
)
def test_a_record_of_another_size_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    """A map would go on into the next record."""
    path = rewritten(
        saved(tmp_path / "x.pth"),
        lambda name, data: change(data) if name.endswith("data/0") else data,
    )
    with pytest.raises(CheckpointError, match=r"x\.pth is damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize("which", ["data.pkl", "data/0", "version"])
def test_a_bomb_is_not_unpacked(tmp_path: Path, which: str, mapped: list[bool]) -> None:
    zeros = bytes(100 * 2**20)
    path = rewritten(
        saved(tmp_path / "x.pth", WEIGHTS),
        lambda name, data: data + zeros if name.endswith(which) else data,
        compressed=which,
    )
    assert path.stat().st_size < 2**20
    with pytest.raises(CheckpointError, match="would unpack to"):
        read_checkpoint(path)
    assert mapped == []


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
@pytest.mark.parametrize("how", ["zip", "plain"])
def test_a_number_in_a_pickle_allocates_nothing(
    tmp_path: Path, module: str, how: str, mapped: list[bool]
) -> None:
    call = b"c" + module.encode() + b"\nbytearray\n\x8a\x06" + (10**13).to_bytes(6, "little")
    data = b"\x80\x02" + call + b"\x85R."
    path = tmp_path / "x.pth"
    if how == "zip":
        rewritten(saved(path), lambda name, old: data if name.endswith("data.pkl") else old)
    else:
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"holds a bytearray.*torch|holds a bytearray"):
        read_checkpoint(path)
    assert mapped == []


def test_a_record_that_is_not_where_the_directory_says(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pth")
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = next(e for e in archive.infolist() if e.filename.endswith("data/1")).header_offset
    data[at : at + 4] = b"XXXX"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.pth is damaged"):
        read_checkpoint(path)


def test_a_name_in_an_archive_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/\u00e9\u00e9.pkl", b"1")
    data = path.read_bytes()
    path.write_bytes(data.replace("\u00e9".encode(), b"\xe1x"))
    with pytest.raises(CheckpointError, match=r"x\.pth is damaged"):
        read_checkpoint(path)


def test_one_mapping_in_many_places_is_walked_once(tmp_path: Path) -> None:
    """Forty to the power of five steps otherwise."""
    inner: Any = {"x": 1}
    for _ in range(10):
        inner = {str(i): inner for i in range(40)}
    with pytest.raises(CheckpointError, match="no tensors"):
        read_checkpoint(saved(tmp_path / "x.pth", {"state_dict": inner, "model": inner}))
    content = {"state_dict": {**inner, "model": WEIGHTS}}
    assert_equal(read_checkpoint(saved(tmp_path / "y.pth", content)).tensors, WEIGHTS)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (torch.empty(2, device="meta"), "a is on the meta device"),
        (torch.eye(2).to_sparse(), "a is sparse"),
        (torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "a is quantised"),
        (torch.zeros(2, dtype=torch.complex64), "a is complex"),
    ],
)
def test_tensors_that_no_model_can_take_are_named(tmp_path: Path, odd: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(saved(tmp_path / "x.pth", {**WEIGHTS, "a": odd}))


class _Call:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "name"), [(eval, "eval"), (os.system, "system"), (torch.save, "torch")]
)
@pytest.mark.parametrize("how", ["zip", "legacy", "plain"])
def test_what_a_pickle_would_run_is_named(
    tmp_path: Path, function: Any, name: str, how: str
) -> None:
    path, content = tmp_path / "x.pt", {"state_dict": WEIGHTS, "x": _Call(function, "1")}
    if how == "plain":
        path.write_bytes(pickle.dumps(content["x"], protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(CheckpointError, match=rf"could run code \(.*{name}.*\); nothing") as caught:
        read_checkpoint(path)
    assert "Weights only load failed" not in str(caught.value)
