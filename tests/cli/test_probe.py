"""``flashbias-convert probe``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import load_recipe_file, probe_model
from flashbias_convert.cli.probe_table import _summary
from tests.checkpoint.models import ARCH, write_tiny
from tests.probing.architectures import levit

from .conftest import Cli
from .test_errors import assert_error, files

SITES = ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"]


class Biased(nn.Module):
    """A model that only a function builds, with a bias that no recipe knows."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(8, 24)
        self.table = nn.Parameter(torch.zeros(2, 20, 20))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT / 2 + self.table).softmax(-1) @ v


class Plain(nn.Linear):
    """A model without attention."""

    def __init__(self) -> None:
        super().__init__(8, 8)


def inputs(model: nn.Module) -> Tensor:
    return torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))


def write_own(path: Path, model: nn.Module) -> list[object]:
    """Its checkpoint; returns the arguments that probe it."""
    generator = torch.Generator().manual_seed(1)
    weights = {k: torch.randn(v.shape, generator=generator) for k, v in model.state_dict().items()}
    torch.save(weights, path)
    built = f"{__name__}:{type(model).__name__}"
    return ["probe", path, "--arch", built, "--inputs", f"{__name__}:inputs"]


def test_a_table_of_sites_and_what_they_add(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrower table breaks its lines
    path = write_tiny(tmp_path / "tiny.safetensors")
    done = cli("probe", path, *ARCH, "--batch", "1")
    assert (done.code, done.err) == (0, "")
    assert all(site in done.out for site in SITES)
    assert "2-D offsets, 8 x 8" in done.out and "timm_swinv2" in done.out
    assert "cosine attention [layers.0.blocks.0.attn" in done.out
    assert "a mask of -100 keeps regions apart, in 4 windows [layers.0.blocks.1.attn]" in done.out
    assert "3 of 3 attention calls have a bias: 3 offset" in done.out
    assert "random inputs (seed 0), two batches of 1" in done.out
    assert files(tmp_path) == {"tiny.safetensors"}


def test_json_and_report_are_the_same(cli: Cli, tmp_path: Path) -> None:
    path, report = write_tiny(tmp_path / "tiny.safetensors"), tmp_path / "r.json"
    done = cli("probe", path, *ARCH, "--batch", "1", "--json", "--report", report)
    assert (done.code, done.err) == (0, "")
    data = done.json()
    assert json.loads(report.read_text()) == data
    assert data["command"] == "probe" and data["exit_code"] == 0
    assert data["probe"]["counts"] == {"offset": 3}
    assert [site["site"] for site in data["probe"]["sites"]] == SITES


def test_a_starting_recipe_for_an_unknown_model(cli: Cli, tmp_path: Path) -> None:
    arguments = write_own(tmp_path / "own.pt", Biased())
    out = tmp_path / "my_recipe.py"
    done = cli(*arguments, "--write-recipe", out)
    assert (done.code, done.err) == (0, "")
    assert "(the model)" in done.out and "dense" in done.out and "none" in done.out
    assert f"wrote {out}, a starting recipe for {__name__}.Biased" in done.out
    recipe = load_recipe_file(out)
    assert recipe.classes == (f"{__name__}.Biased",)
    assert_error(cli(*arguments, "--write-recipe", out), 2, "exists", "--write-recipe")
    assert cli(*arguments, "--write-recipe", out, "--force", "-q").out == ""


def test_no_bias_is_nothing_to_convert(cli: Cli, tmp_path: Path) -> None:
    arguments = write_own(tmp_path / "plain.pt", Plain())
    done = cli(*arguments)
    assert done.code == 3 and "no attention was seen" in done.out
    recipe = tmp_path / "r.py"
    assert_error(cli(*arguments, "--write-recipe", recipe), 3, "no attention of this model has a")
    assert not recipe.exists()
    model = write_own(tmp_path / "zero.pt", Biased())
    torch.save(Biased().state_dict(), tmp_path / "zero.pt")
    zero = cli(*model)
    assert zero.code == 3 and "no bias: there is nothing to convert" in zero.out


def test_zeros_where_a_recipe_is_known_name_it() -> None:
    model, call = levit()
    for name, parameter in model.named_parameters():
        if "attention_biases" in name:
            torch.nn.init.zeros_(parameter)
    words = _summary(probe_model(model, call))
    assert "add zeros or nothing; with other weights" in words and "timm_levit" in words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "batch must be at least 1"),
        (["--energy", "0"], "energy must be in (0, 1]"),
        (["--inputs", "nowhere"], "there are no inputs nowhere"),
        (["--device", "toaster"], "there is no device 'toaster'"),
        (["--write-recipe", "recipe.txt"], "a recipe is a Python file"),
        (["--report", "x.pt"], "no name for a report"),
    ],
)
def test_options_that_make_no_sense(
    cli: Cli, tmp_path: Path, options: list[str], message: str
) -> None:
    path = write_tiny(tmp_path / "tiny.safetensors")
    assert_error(cli("probe", path, *ARCH, *options), 2, message)
    assert files(tmp_path) == {"tiny.safetensors"}


def test_many_sites_are_grouped() -> None:
    from flashbias_convert.cli.probe_table import probe_lines
    from flashbias_convert.probing import Probe, SiteProbe

    sites = tuple(
        SiteProbe(f"blocks.{i}.attn", "m.Attention", "softmax", "offset", "1-D offsets", 2, 64, 64)
        for i in range(100)
    )
    table, summary = probe_lines(Probe("m.Model", sites, 0.99, "inputs"), 160, verbose=False)
    assert list(table.columns[0].cells) == ["blocks.*.attn (100)"]  # type: ignore[union-attr]
    assert str(summary).startswith("100 of 100 attention calls have a bias: 100 offset")
