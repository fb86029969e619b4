"""Bad input: one clear line, a hint, the right exit code, and nothing written."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from flashbias_convert.checkpoint import write
from flashbias_convert.cli import main
from flashbias_convert.errors import DecompositionError
from flashbias_convert.inspection import planning
from flashbias_convert.plan import SitePlan
from tests.checkpoint.models import ARCH, ARGS, NAME, tiny_weights, write_tiny, write_tiny_folder
from tests.checkpoint.test_load import NAN, edited
from tests.checkpoint.test_read import Malicious, damaged, write_shards
from tests.timm_abilities import needs, works

from .conftest import Cli, Result


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def assert_error(done: Result, code: int, message: str, hint: str = "") -> None:
    """One line, perhaps a hint, and no result."""
    assert done.code == code, done.err
    assert done.out == ""
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ") and message in lines[0], done.err
    assert len(lines) <= 2 and all(line.startswith("hint: ") for line in lines[1:]), done.err
    assert hint in done.err


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing.pt", "does not exist"),
        ("empty.pt", "is empty"),
        ("truncated.safetensors", "is damaged"),
        ("huge_header.safetensors", "is damaged"),
        ("huge_tensor.safetensors", "is damaged"),
        ("text.pt", "neither a safetensors file"),
    ],
)
def test_damaged_files(cli: Cli, tmp_path: Path, kind: str, message: str) -> None:
    path = damaged(tmp_path, kind)
    before = files(tmp_path)
    assert_error(cli(path, *ARCH), 1, message)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_what_git_lfs_leaves_in_place_of_a_file(cli: Cli, tmp_path: Path, name: str) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    (tmp_path / name).write_text(text)
    assert_error(cli(tmp_path / name, *ARCH), 1, "Git LFS left in their place", "git lfs pull")


def test_a_pickle_with_code(cli: Cli, tmp_path: Path) -> None:
    torch.save({"state_dict": tiny_weights(), "x": Malicious(tmp_path / "trap")}, tmp_path / "x.pt")
    assert_error(cli(tmp_path / "x.pt", *ARCH), 1, "could run code", "hint: where you trust it")
    assert files(tmp_path) == {"x.pt"}


def test_a_folder_without_config(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    assert_error(cli(folder), 2, "does not say which architecture", "--arch timm:NAME")
    assert files(tmp_path) == {"m", "m/model.safetensors"}


def test_an_ambiguous_state_dict(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = ["swinv2_tiny_window8_256", "swinv2_tiny_window16_256"]
    model = timm.create_model(pair[0])
    monkeypatch.setattr(timm, "list_models", lambda *args, **kwargs: pair)
    torch.save(model.state_dict(), tmp_path / "x.pth")
    done = cli(tmp_path / "x.pth")
    assert_error(done, 2, "fit 2 architectures: timm:swinv2_tiny_window8_256, timm:swinv2_tiny")
    assert "choose: --arch" in done.err
    assert files(tmp_path) == {"x.pth"}


def test_an_unknown_architecture(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    assert_error(cli(path, "--arch", "timm:nonsense_net"), 2, "timm has no model 'nonsense_net'")
    assert_error(cli(path, "--arch", "nonsense"), 2, "cannot read the architecture")
    assert_error(cli(path, "--arch", f"timm:{NAME}"), 1, "tensors are in the file", "--arch-args")
    assert files(tmp_path) == {"x.safetensors"}


def test_an_argument_that_the_architecture_does_not_take(cli: Cli, tmp_path: Path) -> None:
    refuses = not works(lambda: timm.create_model(NAME, **ARGS, foo=1))
    needs(refuses, "a SwinV2 that takes no other arguments")
    path = write_tiny(tmp_path / "x.safetensors")
    assert_error(cli(path, "--arch", f"timm:{NAME}", "--arch-args", '{"foo": 1}'), 2, "foo")
    assert files(tmp_path) == {"x.safetensors"}


def test_no_biased_site(cli: Cli, tmp_path: Path) -> None:
    model = timm.create_model("test_vit")
    torch.save(model.state_dict(), tmp_path / "x.pth")
    done = cli(tmp_path / "x.pth", "--arch", "timm:test_vit")
    assert_error(done, 3, "no module of this model has a recipe", "timm.models.beit.Attention")
    assert files(tmp_path) == {"x.pth"}


def test_all_sites_left_alone(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(path, *ARCH, "--exclude", "re:.*")
    assert done.code == 3
    assert "none of the 3 sites is worth converting: excluded by 're:.*'" in done.err
    assert "force-all" not in done.err
    assert "left alone" in done.out  # the table says why
    assert files(tmp_path) == {"x.safetensors"}


@pytest.mark.parametrize("existing", ["x.flashbias.safetensors", "x.flashbias.plan.json"])
def test_an_output_that_exists(cli: Cli, tmp_path: Path, existing: str) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    (tmp_path / existing).write_text("precious")
    assert_error(cli(path, *ARCH), 2, f"{existing} exists", "--force")
    assert (tmp_path / existing).read_text() == "precious"
    assert files(tmp_path) == {"x.safetensors", existing}
    assert cli(path, *ARCH, "--force").code == 0


def test_the_input_as_output(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    before = path.read_bytes()
    assert_error(cli(path, *ARCH, "-o", path, "--force"), 2, "would change the input")
    assert_error(cli(path, *ARCH, "--report", path, "--force"), 2, "overwrite the checkpoint")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "report",
    [
        "x.safetensors",
        "x.flashbias.safetensors",
        "x.flashbias.plan.json",
        "config.json",
        "other.pt",
        "folder",
        "link",
    ],
)
def test_a_report_in_the_place_of_something_else(cli: Cli, tmp_path: Path, report: str) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(path)
    before, weights = files(tmp_path), path.read_bytes()
    assert_error(
        cli(path, *ARCH, "--report", tmp_path / report, "--force"), 2, "report", "choose another"
    )
    assert files(tmp_path) == before
    assert path.read_bytes() == weights and (tmp_path / "config.json").read_text() == "precious"


@pytest.mark.parametrize("report", ["m.flashbias/report.json", "m/report.json"])
def test_a_report_in_a_folder_of_weights(cli: Cli, tmp_path: Path, report: str) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    (tmp_path / "m.flashbias").mkdir()
    before = files(tmp_path)
    assert_error(cli(folder, "--report", tmp_path / report, "--force"), 2, "the report would")
    assert files(tmp_path) == before


def test_a_full_disk(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write, "save_file", no_space)
    done = cli(write_tiny(tmp_path / "x.safetensors"), *ARCH)
    assert done.code == 1
    assert "error: writing failed, nothing was kept: No space left on device" in done.err
    assert files(tmp_path) == {"x.safetensors"}


def test_a_folder_that_cannot_be_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    assert_error(cli(path, *ARCH, "-o", tmp_path / "no" / "x.safetensors"), 2, "does not exist")
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert_error(cli(path, *ARCH), 2, "no permission to write")


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_a_pattern_that_matches_nothing(cli: Cli, tmp_path: Path, option: str) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(path, *ARCH, option, "layers.9.attn")
    assert_error(done, 2, "'layers.9.attn' matches no site", "layers.0.blocks.0.attn")
    assert files(tmp_path) == {"x.safetensors"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--energy", "0"], "energy must be in (0, 1]"),
        (["--energy", "1.5"], "energy must be in (0, 1]"),
        (["--energy", "nan"], "energy must be in (0, 1]"),
        (["--energy", "much"], "should be a valid number"),
        (["--max-rank", "0"], "max_rank must be at least 1"),
        (["--max-attention-error", "-1"], "max_attention_error must be in [0, 1]"),
        (["--method", "magic"], "'magic' is not one of"),
        (["--target", "h1000"], "target must be one of a100, h100, h200, got 'h1000'"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--device", "toaster"], "there is no device 'toaster'"),
        (["--device", "meta"], "there is no device 'meta'"),
        (["--device", "mps"], "there is no device 'mps'"),
        (["--device", "cuda:99"], "there is no device 'cuda:99' here"),
        (["--arch-args", "{"], "--arch-args is not JSON"),
        (["--arch-args", "[1]"], "--arch-args must be a JSON object"),
        (["--recipe", "nowhere.py"], "recipe file nowhere.py does not exist"),
        (["--output", "x.pt"], "must end in .safetensors"),
        (["one", "more"], "unexpected extra argument"),
    ],
)
def test_options_that_make_no_sense(
    cli: Cli, tmp_path: Path, options: list[str], message: str
) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    assert_error(cli(path, *options), 2, message)
    assert files(tmp_path) == {"x.safetensors"}


def test_a_recipe_file_that_fails(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    (tmp_path / "r.py").write_text("1 / 0")
    assert_error(cli(path, *ARCH, "--recipe", tmp_path / "r.py"), 2, "ZeroDivisionError")


def test_shards(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    index = write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert_error(cli(folder, *ARCH), 1, "model-00002-of-00002.safetensors is missing")
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    assert_error(cli(folder, *ARCH), 1, "names a shard outside its folder")
    assert not (tmp_path / "m.flashbias").exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.update(format_version=2), "format version 2, this program reads 1"),
        (lambda p: p["sites"][0].pop("name") and None, "the plan is damaged"),
    ],
)
def test_plans_that_cannot_be_shown(
    cli: Cli, tmp_path: Path, converted: Path, edit: Any, message: str
) -> None:
    assert_error(cli("show", edited(converted, tmp_path, edit)), 1, message)


def test_nan_in_one_bias_of_several_is_failed_too(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors", **NAN)
    done = cli(path, *ARCH)
    assert done.code == 1
    line, hint = done.err.splitlines()
    assert line.startswith("error: 1 of 3 sites have a bias that is not finite")
    assert "layers.0.blocks.0.attn: " in line and "--exclude layers.0.blocks.0.attn" in hint
    assert "failed: " in done.out and "[layers.0.blocks.0.attn]" in done.out
    assert files(tmp_path) == {"x.safetensors"}


def test_the_other_sites_are_converted_when_asked(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors", **NAN)
    done = cli(path, *ARCH, "--exclude", "layers.0.blocks.0.attn")
    assert done.code == 0
    assert "2 of 3 sites converted" in done.out
    assert (tmp_path / "x.flashbias.safetensors").exists()


@pytest.fixture
def one_site_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SVD that never converges at one site, say."""
    decide = planning._decide

    def breaks(plan: SitePlan, *rest: Any) -> SitePlan:
        if plan.name == "layers.0.blocks.0.attn":
            raise DecompositionError("an SVD that never converges")
        return decide(plan, *rest)

    monkeypatch.setattr(planning, "_decide", breaks)


@pytest.mark.usefixtures("one_site_breaks")
def test_a_site_that_breaks_is_done_in_part(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    done = cli(path, *ARCH)
    assert done.code == 5
    assert "2 of 3 sites converted, 1 failed" in done.out
    (line,) = done.err.splitlines()
    told = "error: 1 of 3 sites failed and stayed as they were: layers.0.blocks.0.attn: "
    assert line.startswith(told) and len(line) > len(told)
    assert "failed: " in done.out and "[layers.0.blocks.0.attn]" in done.out
    assert (tmp_path / "x.flashbias.safetensors").exists()


def test_nan_in_the_only_bias_is_failed(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors", **NAN)
    done = cli(path, *ARCH, "--include", "layers.0.blocks.0.attn", "--json")
    assert done.code == 1
    data = done.json()
    assert data["exit_code"] == 1 and data["error"]["type"] == "NotFiniteError"
    assert data["plan"]["sites"][0]["status"] == "failed"
    assert files(tmp_path) == {"x.safetensors"}


def test_errors_are_json_too_when_asked(cli: Cli) -> None:
    done = cli("nowhere.pt", "--json")
    data = done.json()
    assert data["exit_code"] == done.code == 1
    assert data["error"]["message"] == "nowhere.pt does not exist"
    assert done.err.startswith("error: nowhere.pt does not exist")


def test_a_traceback_only_on_request(cli: Cli) -> None:
    assert "Traceback" not in cli("nowhere.pt").err
    assert "Traceback" in cli("nowhere.pt", "--debug").err


def test_an_interrupt_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashbias_convert.checkpoint.convert_checkpoint", interrupted)
    assert_error(cli("x.pt"), 130, "interrupted, no output was written")


def test_an_interrupt_during_the_imports_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    name = "flashbias_convert.cli.app"
    monkeypatch.setitem(sys.modules, name, Interrupted(name))
    with pytest.raises(SystemExit) as caught:
        main(["x.pt"])
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "error: interrupted, no output was written\n")


def test_a_bug_is_told_without_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("flashbias_convert.checkpoint.convert_checkpoint", broken)
    assert_error(cli("x.pt"), 1, "RuntimeError: two lines", "--debug")
