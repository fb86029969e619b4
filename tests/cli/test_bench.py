"""``flashbias-convert bench``: what it shows, what it writes, and how it ends."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.cli.app import run
from flashbias_convert.cli.benchmark_tables import benchmark_lines
from tests.benchmark.reports import report_of_a_card
from tests.checkpoint.models import ARCH, TiedToy, write_tiny, write_tiny_folder

from .conftest import Cli
from .test_errors import assert_error, files

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
QUICK = ["--repeats", "1", "--no-compile", "--batch", "2", "--max-tokens", "0"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which nothing is wrapped, whoever runs the tests."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact conversion, its original beside it; do not change them."""
    path = write_tiny(tmp_path_factory.mktemp("bench") / "tiny.safetensors")
    assert run([str(path), *ARCH, "--method", "exact", "-q"]) == 0
    return path.with_name("tiny.flashbias.safetensors")


def alone(exact: Path, folder: Path) -> Path:
    """The converted file where no original lies beside it."""
    copy = folder / exact.name
    copy.write_bytes(exact.read_bytes())
    return copy


def test_a_converted_file_finds_its_original_beside_it(cli: Cli, exact: Path) -> None:
    before = files(exact.parent)
    done = cli("bench", exact, *QUICK)
    assert done.code == 0, done.err
    first, header, *_ = done.out.splitlines()
    assert first == f"{exact}, original {exact.with_name('tiny.safetensors')}, found beside it"
    assert "(cpu, " in header and "float32, torch " in header and "triton" in header
    assert "they say nothing about a GPU" in done.out
    for row in ("original, eager", "converted, eager", "dense bias, SDPA", "no bias, SDPA"):
        assert row in done.out
    assert "within rounding" in done.out and "not measured" in done.out
    assert "attention of layers.0.blocks.0.attn: batch 8, 1 heads of 16, N = 64" in done.out
    assert "break-even" not in done.out
    assert files(exact.parent) == before


def test_without_its_original_a_converted_file_holds_the_weights(
    cli: Cli, tmp_path: Path, exact: Path
) -> None:
    path = alone(exact, tmp_path)
    done = cli("bench", path, *QUICK, "--json")
    assert (done.code, done.err) == (0, "")
    data = done.json()
    assert data["source"] == f"{path}, original from its own weights"
    assert data["exit_code"] == 0 and data["benchmark"]["dtype"] == "float32"
    # another model of the same name is not taken for the original
    write_tiny(tmp_path / "tiny.safetensors", **{"head.fc.bias": torch.ones(5)})
    again = cli("bench", path, *QUICK, "--json").json()
    assert again["source"] == data["source"]
    rows = {row["name"]: row["verdict"] for row in again["benchmark"]["cases"][0]["rows"]}
    assert rows["converted, eager"] == "within rounding"


def test_an_original_that_is_named(cli: Cli, tmp_path: Path, exact: Path) -> None:
    path = alone(exact, tmp_path)
    good = exact.with_name("tiny.safetensors")
    done = cli("bench", path, "--original", good, *QUICK, "--json")
    assert done.json()["source"] == f"{path}, original {good}"
    other = write_tiny(tmp_path / "other.safetensors", **{"head.fc.bias": torch.ones(5)})
    wrong = cli("bench", path, "--original", other, *QUICK)
    assert_error(wrong, 2, f"was not made from {other}: 1 weights differ, such as head.fc.bias")


def test_a_folder_finds_its_original(cli: Cli, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    convert_checkpoint(folder)
    done = cli("bench", tmp_path / "m.flashbias", *QUICK, "--json")
    assert done.code == 0, done.err
    assert done.json()["source"].endswith(f"original {tmp_path / 'm'}, found beside it")


def test_without_a_terminal_every_step_is_a_line_on_stderr(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    options = [*QUICK, "--max-tokens", "16", "--method", "exact"]
    lines = cli("bench", path, *ARCH, *options).err.splitlines()
    counts = [tuple(map(int, line.rpartition("(")[2].rstrip(")").split(" of "))) for line in lines]
    measured = [line.startswith("measuring ") for line in lines]
    sites = measured.index(True)
    assert lines[0] == f"decomposed layers.0.blocks.0.attn (1 of {sites})"
    assert counts[:sites] == [(at, sites) for at in range(1, sites + 1)]
    assert all(measured[sites:])
    assert [at for at, _ in counts[sites:]] == list(range(1, len(lines) - sites + 1))
    assert counts[-1][0] == counts[-1][1]
    for step in ("original, eager", "layers.0.blocks.0.attn: converted", "N = 16: converted"):
        assert any(line.startswith(f"measuring {step} (") for line in lines)
    assert cli("bench", path, *ARCH, *options, "--quiet").err == ""
    assert cli("bench", path, *ARCH, *options, "--json").err == ""


def test_an_original_is_converted_in_memory(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    table, figure = tmp_path / "x.csv", tmp_path / "x.png"
    options = ["--max-tokens", "16", "--csv", table, "--plot", figure, "--method", "svd"]
    done = cli("bench", path, *ARCH, *QUICK, *options)
    assert done.code == 0, done.err
    assert done.out.startswith(f"{path}, converted in memory\n")
    assert "approximate" in done.out
    assert "break-even with the best correct dense bias, measured here" in done.out
    assert "its own N is always 64; other lengths are synthetic shapes" in done.out
    assert done.out.endswith(f"wrote {table}\nwrote {figure}\n")
    assert files(tmp_path) == {"x.safetensors", "x.csv", "x.png"}
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["part"] for row in rows} == {"model", "site", "break-even"}
    (ours,) = [row for row in rows if row["row"] == "converted, eager"]
    assert float(ours["median_ms"]) > 0 and ours["peak_mib"] == "" and ours["device"] == "cpu"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert_error(cli("bench", path, *ARCH, *QUICK, "--csv", table), 2, "x.csv exists")
    assert cli("bench", path, *ARCH, *QUICK, "--csv", table, "--force", "-q").out == ""


def test_a_damaged_term_ends_with_the_code_of_a_verification(
    cli: Cli, tmp_path: Path, exact: Path
) -> None:
    path = alone(exact, tmp_path)
    tensors = load_file(path)
    key = next(k for k in tensors if k.endswith("relative_table.table"))
    tensors[key] += 0.5 * torch.randn(tensors[key].shape)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)
    done = cli("bench", path, *QUICK)
    assert done.code == 4 and "WRONG: exceeds rounding" in done.out
    assert done.err.splitlines()[-1].startswith("error: converted, eager is wrong: error ")


def inputs_of_another_size(model: torch.nn.Module) -> torch.Tensor:
    return torch.zeros(2, 3, 30, 30)


def toy_inputs(model: torch.nn.Module) -> torch.Tensor:
    return torch.randn(2, 36, 16, generator=torch.Generator().manual_seed(0))


def test_a_model_that_only_a_function_builds(cli: Cli, tmp_path: Path) -> None:
    torch.save(TiedToy().state_dict(), tmp_path / "x.pt")
    (tmp_path / "my_recipe.py").write_text("from tests.toy import TOY as recipe\n")
    what = ["--arch", "tests.checkpoint.models:TiedToy", "--recipe", tmp_path / "my_recipe.py"]
    inputs = ["--inputs", f"{__name__}:toy_inputs"]
    done = cli("bench", tmp_path / "x.pt", *what, *inputs, *QUICK)
    assert done.code == 0, done.err
    assert "note: the inputs of tests.cli.test_bench:toy_inputs" in done.out
    assert cli(tmp_path / "x.pt", *what, "-q").code == 0
    again = cli("bench", tmp_path / "x.flashbias.safetensors", *what, *inputs, *QUICK)
    assert again.code == 0 and "found beside it" in again.out, again.err


def test_a_model_without_sites_has_nothing_to_measure(cli: Cli, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "x.pt")
    done = cli("bench", tmp_path / "x.pt", "--arch", "tests.cli.test_bench:linear", *QUICK)
    assert_error(done, 3, "no module of this model has a recipe")


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--batch", "0"], 2, "batch must be at least 1"),
        (["--repeats", "0"], 2, "repeats must be at least 1"),
        (["--tokens", "0"], 2, "tokens must be at least 1"),
        (["--max-tokens", "-1"], 2, "--max-tokens must be at least 0"),
        (["--tokens", "8"], 2, "does not take tokens"),
        (["--inputs", "nowhere"], 2, "there are no inputs nowhere"),
        (["--inputs", f"{__name__}:inputs_of_another_size"], 1, "does not run"),
        (["--dtype", "float64"], 2, "'float64' is not one of"),
        (["--device", "toaster"], 2, "there is no device 'toaster'"),
        (["--energy", "0.9"], 2, "was converted already, and options say how to convert"),
        (["--csv", "x.pt"], 2, "no name for a report"),
        (["--plot", "x.jpg"], 2, "must end in .png"),
        (["--csv", "x.png", "--plot", "x.png"], 2, "name the same file"),
    ],
)
def test_options_that_make_no_sense(
    cli: Cli, exact: Path, options: list[str], code: int, message: str
) -> None:
    before = files(exact.parent)
    assert_error(cli("bench", exact, *QUICK, *options), code, message)
    assert files(exact.parent) == before


def test_an_original_for_an_original(cli: Cli, exact: Path) -> None:
    path = exact.with_name("tiny.safetensors")
    done = cli("bench", path, *ARCH, "--original", path, *QUICK)
    assert_error(done, 2, "is not converted, so it is the original")
    assert_error(cli("bench", "nowhere.pt", *QUICK), 1, "nowhere.pt does not exist")


def test_a_figure_needs_matplotlib(
    cli: Cli, tmp_path: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = cli("bench", exact, *QUICK, "--plot", tmp_path / "x.png")
    assert_error(done, 2, "figures need matplotlib", "flashbias-convert[plot]")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_verdicts_are_not_cut_in_a_narrow_terminal(width: int) -> None:
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as capture:
        for line in benchmark_lines(report_of_a_card(), width):
            console.print(line, soft_wrap=isinstance(line, str))
    for line in capture.get().splitlines():
        if line.startswith(("original, eager", "converted", "dense bias, SDPA")):
            assert "within" in line and "…" not in line


def test_the_output_on_a_card_shows_memory() -> None:
    from rich.console import Console

    from tests.benchmark.reports import report_of_a_card

    console = Console(width=160)
    with console.capture() as capture:
        for line in benchmark_lines(report_of_a_card(), 160):
            console.print(line)
    text: Any = capture.get()
    assert "1234.5" in text and "not measured" not in text
    assert "2 sites, 4 heads of 32, alibi, causal: faster from N = 64 on" in text
    assert "FlexAttention: failed: out of memory" in text
