"""``flashbias-convert verify`` and ``convert --verify``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashbias_convert.cli.app import run
from flashbias_convert.cli.verdicts import comparison_table, verdict
from flashbias_convert.verification import Comparison, Difference
from tests.checkpoint.models import ARCH, tiny_weights, write_tiny

from .conftest import Cli
from .test_errors import assert_error, files

SITES = ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"]
FEW = ["--samples", "2"]


def original(tmp_path: Path) -> Path:
    """The checkpoint that the fixture `converted` was made from.

    At initialisation the norms after its attention are zero: nothing of it would come out.
    """
    norms = {k: torch.ones_like(v) for k, v in tiny_weights().items() if "norm1.weight" in k}
    return write_tiny(tmp_path / "original.safetensors", **norms)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted file; do not change it."""
    path = original(tmp_path_factory.mktemp("verify"))
    assert run([str(path), *ARCH, "--method", "svd", "-q"]) == 0
    return path.with_name("original.flashbias.safetensors")


def test_truncated_terms_are_reported_beside_rounding(
    cli: Cli, tmp_path: Path, converted: Path
) -> None:
    done = cli("verify", original(tmp_path), converted, *FEW)
    assert (done.code, done.err) == (0, "")
    assert all(site in done.out for site in SITES)
    assert "2 samples: random inputs (seed 0); float32 on cpu" in done.out
    assert "rounding against float64" in done.out
    assert "approximate: everything is finite, and no limit was given" in done.out
    assert "same choice in " in done.out


def test_limits_decide(cli: Cli, tmp_path: Path, converted: Path) -> None:
    path = original(tmp_path)
    done = cli("verify", path, converted, *FEW, "--max-difference", "1e-9")
    assert done.code == 4 and "outputs differ by" in done.out
    (line,) = done.err.splitlines()
    assert line.startswith("error: not verified: outputs differ by")
    kept = cli("verify", path, converted, *FEW, "--max-difference", "9", "--min-agreement", "0")
    assert kept.code == 0
    assert "verified: approximate, keeps --max-difference 9 and --min-agreement 0" in kept.out


def test_json_and_report_are_the_same(cli: Cli, tmp_path: Path, converted: Path) -> None:
    path, report = original(tmp_path), tmp_path / "r.json"
    done = cli("verify", path, converted, *FEW, "--json", "--report", report, "--seed", "3")
    assert (done.code, done.err) == (0, "")
    data = done.json()
    assert json.loads(report.read_text()) == data
    found = data["verification"]
    assert data["exit_code"] == 0 and found["passed"] and found["samples"] == 2
    assert [site["name"] for site in found["sites"]] == SITES
    assert found["inputs"] == "random inputs (seed 3)"
    assert cli("verify", path, converted, *FEW, "--report", report).code == 2
    assert cli("verify", path, converted, *FEW, "--report", report, "--force", "-q").out == ""


def test_inputs_from_a_folder_of_images(cli: Cli, tmp_path: Path, converted: Path) -> None:
    from tests.inputs.test_inputs import write_images

    folder = write_images(tmp_path / "images", [f"{c}/{i}.png" for c in "abcde" for i in (1, 2)])
    done = cli("verify", original(tmp_path), converted, "--inputs", folder, "--samples", "7")
    assert done.code == 0, done.err
    assert f"7 samples: 7 of 10 images in {folder}" in done.out
    assert "top-1 " in done.out and " of 7 labelled samples" in done.out
    assert "note: the 5 folders are taken for the model's classes" in done.out


def test_a_function_of_the_working_directory_makes_inputs(
    cli: Cli, tmp_path: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_inputs.py").write_text(
        "import torch\ndef make(model):\n    return torch.zeros(3, 3, 32, 32)\n"
    )
    done = cli("verify", original(tmp_path), converted, "--inputs", "own_inputs:make")
    assert done.code == 0, done.err
    assert "3 samples: the inputs of own_inputs:make" in done.out


def test_a_damaged_term_of_an_exact_conversion_is_found(cli: Cli, tmp_path: Path) -> None:
    path, output = original(tmp_path), tmp_path / "exact.safetensors"
    assert cli(path, *ARCH, "--method", "exact", "-o", output, "-q").code == 0
    good = cli("verify", path, output, *FEW)
    assert good.code == 0
    assert "verified: exact, within twice the original's own rounding in float32" in good.out
    tensors = load_file(output)
    key = next(k for k in tensors if k.endswith("relative_table.table"))
    tensors[key] += 0.5 * torch.randn(tensors[key].shape)
    with safe_open(output, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, output, metadata=metadata)
    bad = cli("verify", path, output, *FEW)
    assert bad.code == 4 and "exceeds rounding" in bad.out
    assert bad.err.startswith("error: not verified: output output: exceeds rounding: error ")


def toy_inputs(model: torch.nn.Module) -> torch.Tensor:
    return torch.randn(2, 36, 16, generator=torch.Generator().manual_seed(0))


def test_a_model_that_only_a_function_builds(cli: Cli, tmp_path: Path) -> None:
    from tests.checkpoint.models import TiedToy

    torch.save(TiedToy().state_dict(), tmp_path / "x.pt")
    (tmp_path / "my_recipe.py").write_text("from tests.toy import TOY as recipe\n")
    what = ["--arch", "tests.checkpoint.models:TiedToy", "--recipe", tmp_path / "my_recipe.py"]
    inputs = f"{__name__}:toy_inputs"
    options = ["--method", "exact", "--verify", "--verify-inputs", inputs]
    done = cli(tmp_path / "x.pt", *what, *options)
    assert done.code == 0, done.err
    assert "verified: exact" in done.out
    output = tmp_path / "x.flashbias.safetensors"
    again = cli("verify", tmp_path / "x.pt", output, *what, "--inputs", inputs)
    assert again.code == 0, again.err
    without = cli("verify", tmp_path / "x.pt", output, *what)
    assert_error(without, 2, "TiedToy does not say what inputs it takes", "package.module:function")


# -- convert --verify ----------------------------------------------------------------------


def test_convert_verifies_before_the_file_has_its_name(cli: Cli, tmp_path: Path) -> None:
    path = original(tmp_path)
    done = cli(path, *ARCH, "--method", "exact", "--verify", "--verify-samples", "2", "--json")
    assert (done.code, done.err) == (0, "")
    data = done.json()
    assert data["verification"]["passed"] and data["verification"]["mode"] == "exact"
    assert Path(data["output"]).exists()


def test_nothing_is_kept_that_does_not_agree(cli: Cli, tmp_path: Path) -> None:
    path, report = original(tmp_path), tmp_path / "r.json"
    before = files(tmp_path)
    options = ["--verify", "--verify-samples", "2", "--max-difference", "0"]
    done = cli(path, *ARCH, *options)
    assert done.code == 4 and files(tmp_path) == before
    assert done.err.startswith("error: not verified, nothing was kept: outputs differ by ")
    assert SITES[0] in done.out and "rounding" in done.out
    told = cli(path, *ARCH, *options, "--json", "--report", report)
    assert told.code == 4 and files(tmp_path) == {*before, "r.json"}
    data = told.json()
    assert data["exit_code"] == 4 and data["error"]["type"] == "VerificationError"
    assert data["verification"]["passed"] is False and data["plan"]["sites"]
    assert json.loads(report.read_text())["verification"] == data["verification"]


def test_an_old_output_survives_a_failed_verification(cli: Cli, tmp_path: Path) -> None:
    path, output = original(tmp_path), tmp_path / "out.safetensors"
    assert cli(path, *ARCH, "-o", output, "-q").code == 0
    old = output.read_bytes()
    options = ["--verify", "--max-difference", "0", "--verify-samples", "1", "--force"]
    assert cli(path, *ARCH, "-o", output, *options).code == 4
    assert output.read_bytes() == old


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-difference", "1"], "--max-difference says how to verify"),
        (["--verify-inputs", "random"], "--verify-inputs says how to verify"),
        (["--verify", "--dry-run"], "a dry run writes nothing"),
        (["--verify", "--verify-samples", "0"], "samples must be at least 1"),
        (["--verify", "--verify-inputs", "nowhere"], "there are no inputs nowhere"),
        (["--verify", "--min-agreement", "2"], "--min-agreement must be in [0, 1]"),
        (["--verify", "--max-difference", "nan"], "--max-difference must be at least 0"),
        (["--verify", "--verify-dtype", "float64"], "'float64' is not one of"),
    ],
)
def test_options_of_convert_that_make_no_sense(
    cli: Cli, tmp_path: Path, options: list[str], message: str
) -> None:
    path = original(tmp_path)
    assert_error(cli(path, *ARCH, *options), 2, message)
    assert files(tmp_path) == {"original.safetensors"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "0"], "samples must be at least 1"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--tokens", "0"], "tokens must be a positive integer"),
        (["--inputs", "nowhere"], "there are no inputs nowhere"),
        (["--tokenizer", "nowhere"], "the tokenizer nowhere is not a folder"),
        (["--dtype", "float64"], "'float64' is not one of"),
        (["--device", "toaster"], "there is no device 'toaster'"),
        (["--arch-args", "{"], "--arch-args is not JSON"),
        (["--report", "x.pt"], "no name for a report"),
    ],
)
def test_options_of_verify_that_make_no_sense(
    cli: Cli, tmp_path: Path, converted: Path, options: list[str], message: str
) -> None:
    assert_error(cli("verify", original(tmp_path), converted, *options), 2, message)


def test_files_that_cannot_be_compared(cli: Cli, tmp_path: Path, converted: Path) -> None:
    path = original(tmp_path)
    assert_error(cli("verify", path, path), 1, "is not a converted checkpoint")
    assert_error(cli("verify", converted, converted), 1, "was converted already")
    assert_error(cli("verify", "nowhere.pt", converted), 1, "nowhere.pt does not exist")
    report = ["--report", converted, "--force"]
    assert_error(cli("verify", path, converted, *report), 2, "would overwrite")


# -- the table -----------------------------------------------------------------------------


def row(name: str, error: float, passed: bool = True) -> Comparison:
    numbers = Difference(error, error, 1.0, 1.0, error, error, 1.0, 2.0, 2.0)
    return Comparison(name, "exact", "within rounding" if passed else "exceeds rounding", numbers)


def test_many_sites_show_the_worst_first() -> None:
    rows = [row("output", 1.0), *(row(f"site.{i}", i / 1000) for i in range(1000))]
    rows.insert(1, row("broken", 1e-9, passed=False))
    rows.append(Comparison("silent", "exact", "not run", reason="it did not run"))
    table = comparison_table(rows, 1, 120)
    names = list(table.columns[0].cells)
    assert names[:4] == ["output", "silent", "broken", "site.999"] and len(names) == 40
    assert "963 more are left out" in str(table.caption)


def test_the_verdict_says_why(cli: Cli, tmp_path: Path, converted: Path) -> None:
    import dataclasses

    from flashbias_convert import verify_files

    found = verify_files(original(tmp_path), converted, samples=1)
    failed = dataclasses.replace(found, reasons=("because", "and because"))
    assert verdict(failed) == "not verified: because; and because"
