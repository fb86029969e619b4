"""Writing: complete and equal to what was meant, or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from flashbias_convert.checkpoint import read_plan, write
from flashbias_convert.checkpoint.outputs import check_output, output_path
from flashbias_convert.checkpoint.write import prepare, write_file, write_folder
from flashbias_convert.errors import CheckpointError, UsageError
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.plan import Plan

PLAN = Plan(DecomposeOptions(), [], arch=None, versions={"torch": "2"})
WEIGHTS = {"a": torch.randn(3, 4), "n": torch.tensor([1, 2])}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_plan_is_in_the_header_and_beside(tmp_path: Path) -> None:
    write_file(tmp_path / "x.flashbias.safetensors", WEIGHTS, PLAN, metadata={"origin": "me"})
    assert names(tmp_path) == ["x.flashbias.plan.json", "x.flashbias.safetensors"]
    assert read_plan(tmp_path / "x.flashbias.safetensors") == PLAN
    with safe_open(tmp_path / "x.flashbias.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["origin"] == "me"


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN)
    plain = tmp_path / "plain"
    plain.touch()
    assert {p.stat().st_mode for p in tmp_path.iterdir()} == {plain.stat().st_mode}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6)[:, :2],
        torch.randn(4, 6).T,
        torch.randn(4, 6)[:2].T,
        torch.randn(3).expand(2, 3),
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.tensor([True, False]),
        torch.randn(3).bfloat16(),
        torch.randn(3).to(torch.float8_e4m3fn),
        torch.randn(3, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_any_plain_tensor_survives(tmp_path: Path, tensor: torch.Tensor) -> None:
    write_file(tmp_path / "x.safetensors", {"t": tensor}, PLAN)
    found = load_file(tmp_path / "x.safetensors")["t"]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert (
        bytes(found.view(torch.uint8).flatten())
        == bytes(tensor.detach().contiguous().view(torch.uint8).flatten())
        if tensor.dim()
        else found == tensor
    )


def test_tied_tensors_are_stored_once_and_overlaps_are_copied() -> None:
    whole = torch.arange(10.0)
    stored, tied = prepare({"a": whole, "b": whole, "c": whole[2:4], "d": whole.clone()})
    assert tied == {"b": "a"}
    assert list(stored) == ["a", "c", "d"]
    assert stored["c"].data_ptr() != whole[2:4].data_ptr()
    safetensors.torch.save(stored)


def test_tensors_without_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="t is on the meta device"):
        write_file(tmp_path / "x.safetensors", {"t": torch.empty(2, device="meta")}, PLAN)
    with pytest.raises(CheckpointError, match="not a plain dense tensor"):
        write_file(tmp_path / "x.safetensors", {"t": torch.eye(2).to_sparse()}, PLAN)
    assert names(tmp_path) == []


@pytest.mark.parametrize("value", [3, 0.5, [1, 2], {"rank": 3}, None])
def test_what_is_no_tensor_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    """A file of safetensors holds tensors alone; numbers about them are part of the plan."""
    with pytest.raises(CheckpointError, match=f"extra is no tensor but a {type(value).__name__}"):
        write_file(tmp_path / "x.safetensors", {"extra": value}, PLAN)
    assert names(tmp_path) == []


# -- existing files ------------------------------------------------------------------------


@pytest.mark.parametrize("existing", ["x.safetensors", "x.plan.json"])
def test_nothing_is_overwritten_unless_forced(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(UsageError, match=r"exists.*--force"):
        write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN)
    assert (tmp_path / existing).read_text() == "precious"
    assert names(tmp_path) == [existing]
    write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN, force=True)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], WEIGHTS["a"])


def test_a_file_that_appears_while_we_write_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_save(*args: Any, **kwargs: Any) -> None:
        safetensors.torch.save_file(*args, **kwargs)
        (tmp_path / "x.safetensors").write_text("precious")

    monkeypatch.setattr(write, "save_file", slow_save)
    with pytest.raises(UsageError, match="exists"):
        write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN)
    assert names(tmp_path) == ["x.safetensors"]
    assert (tmp_path / "x.safetensors").read_text() == "precious"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere does not exist"):
        write_file(tmp_path / "nowhere" / "x.safetensors", WEIGHTS, PLAN)


def test_a_folder_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(UsageError, match="no permission to write"):
        write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN)


# -- failures ------------------------------------------------------------------------------


def no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken_serialiser(*args: Any, **kwargs: Any) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("owner", "function", "fault"),
    [
        (write, "save_file", no_space),
        (write, "save_file", broken_serialiser),
        (os, "fsync", no_space),
        (Path, "write_text", no_space),
    ],
)
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, function: str, fault: Callable
) -> None:
    monkeypatch.setattr(owner, function, fault)
    with pytest.raises(CheckpointError, match=r"nothing was kept: .*No space left") as caught:
        write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN)
    assert caught.value.hint == f"target: {tmp_path / 'x.safetensors'}"
    assert names(tmp_path) == []


def test_a_failing_rename_leaves_neither_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.link, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "link", second_fails)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN)
    assert names(tmp_path) == []


def test_old_files_are_back_when_publishing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"x.plan.json": "old plan", "x.safetensors": "old weights"}
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    real = os.replace

    def last_fails(source: Path, target: Path) -> None:
        if source.suffix == ".tmp" and target.name == "x.plan.json":
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", last_fails)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN, force=True)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == old


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("step", range(12))
def test_an_interrupt_at_any_step_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool, step: int
) -> None:
    if force:
        write_file(tmp_path / "x.safetensors", {"a": torch.zeros(2)}, PLAN)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    calls = itertools.count()

    def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)  # an interrupt comes after a call as well as before
            if next(calls) == step:
                raise KeyboardInterrupt
            return result

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "link", "rename", "replace", "unlink"):
            patch.setattr(os, name, interrupted(getattr(os, name)))
        with contextlib.suppress(KeyboardInterrupt):
            write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN, force=force)
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.startswith(".")}
    if after != before:
        assert sorted(after) == ["x.plan.json", "x.safetensors"]
        assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], WEIGHTS["a"])


def test_a_folder_in_place_of_the_sidecar_costs_nothing(tmp_path: Path) -> None:
    weights = tmp_path / "x.safetensors"
    weights.write_text("old weights")
    (tmp_path / "x.plan.json").mkdir()
    (tmp_path / "x.plan.json" / "precious").touch()
    with pytest.raises(UsageError, match=r"x\.plan\.json is a folder"):
        check_output(weights, tmp_path / "m.pth", force=True)
    with pytest.raises(UsageError, match=r"x\.plan\.json is a folder"):
        write_file(weights, WEIGHTS, PLAN, force=True)
    assert weights.read_text() == "old weights"
    assert names(tmp_path) == ["x.plan.json", "x.safetensors"]
    assert names(tmp_path / "x.plan.json") == ["precious"]


def test_a_file_system_without_hard_links_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN)
    assert names(tmp_path) == ["x.plan.json", "x.safetensors"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    with pytest.raises(CheckpointError, match="No space left"):
        write_file(tiny_disk / "x.safetensors", {"a": torch.zeros(100_000)}, PLAN)
    assert names(tiny_disk) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: {**t, "a": t["a"] + 1},
        lambda t: {**t, "a": t["a"].double()},
        lambda t: {**t, "a": t["a"].reshape(4, 3)},
        lambda t: {"a": t["a"]},
        lambda t: {**t, "more": torch.ones(1)},
    ],
)
def test_what_does_not_read_back_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable
) -> None:
    def faulty(tensors: Any, path: Path, metadata: Any) -> None:
        safetensors.torch.save_file(damage(tensors), path, metadata=metadata)

    monkeypatch.setattr(write, "save_file", faulty)
    with pytest.raises(CheckpointError, match="does not read back"):
        write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN)
    assert names(tmp_path) == []


# -- folders -------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "vocab.txt", "model.safetensors.index.json", ".hidden"):
        (folder / name).write_text("{}")
    for name in ("model-00001-of-00002.safetensors", "pytorch_model.bin", "tf_model.h5"):
        (folder / name).write_bytes(b"weights")
    return folder


def test_a_folder_gets_the_configs_and_no_other_weights(tmp_path: Path, source: Path) -> None:
    write_folder(tmp_path / "out", WEIGHTS, PLAN, source=source)
    expected = ["config.json", "model.plan.json", "model.safetensors", "vocab.txt"]
    assert names(tmp_path / "out") == expected
    assert names(tmp_path) == ["model", "out"]


def test_only_our_own_folders_are_replaced(tmp_path: Path, source: Path) -> None:
    write_folder(tmp_path / "out", WEIGHTS, PLAN, source=source)
    (tmp_path / "out" / "stale.txt").touch()
    write_folder(tmp_path / "out", WEIGHTS, PLAN, source=source, force=True)
    assert "stale.txt" not in names(tmp_path / "out")
    photos = tmp_path / "photos"
    photos.mkdir()
    for force in (False, True):
        with pytest.raises(UsageError):
            write_folder(photos, WEIGHTS, PLAN, source=source, force=force)
    assert names(tmp_path) == ["model", "out", "photos"]


def test_a_full_disk_leaves_no_folder(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "save_file", no_space)
    with pytest.raises(CheckpointError, match="No space left"):
        write_folder(tmp_path / "out", WEIGHTS, PLAN, source=source)
    assert names(tmp_path) == ["model"]


# -- names ---------------------------------------------------------------------------------


def test_default_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "swin"
    folder.mkdir()
    assert output_path(Path("a/m.ckpt"), None) == Path("a/m.flashbias.safetensors")
    assert output_path(Path("m.v2.pth"), None) == Path("m.v2.flashbias.safetensors")
    assert output_path(folder, None) == tmp_path / "swin.flashbias"
    monkeypatch.chdir(folder)
    assert output_path(Path("."), None) == tmp_path / "swin.flashbias"
    index = folder / "model.safetensors.index.json"
    assert output_path(index, None) == tmp_path / "swin.flashbias"


def test_names_that_the_user_chooses(tmp_path: Path) -> None:
    source = tmp_path / "m.ckpt"
    assert output_path(source, tmp_path / "o.safetensors") == tmp_path / "o.safetensors"
    assert output_path(source, tmp_path) == tmp_path / "m.flashbias.safetensors"
    with pytest.raises(UsageError, match=r"must end in \.safetensors"):
        output_path(source, tmp_path / "o.pt")


def test_the_input_is_never_the_output(tmp_path: Path, source: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.touch()
    (tmp_path / "link.safetensors").symlink_to(path)
    for output in (path, tmp_path / "link.safetensors"):
        with pytest.raises(UsageError, match="would change the input"):
            check_output(output, path, force=True)
    for output in (source, source / "model.safetensors"):
        with pytest.raises(UsageError, match="would change the input"):
            check_output(output, source, force=True)
