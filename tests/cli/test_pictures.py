"""``inspect --plot`` and ``inspect --html``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.models import ARCH, write_tiny

from .conftest import Cli
from .test_errors import assert_error, files

SITES = ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"]


def test_figures_and_a_page(cli: Cli, tmp_path: Path) -> None:
    path, figures, page = (
        write_tiny(tmp_path / "x.safetensors"),
        tmp_path / "f",
        tmp_path / "p.html",
    )
    done = cli("inspect", path, *ARCH, "--plot", figures, "--html", page)
    assert (done.code, done.err) == (0, "")
    assert f"drew 8 figures in {figures}" in done.out and f"wrote {page} (" in done.out
    assert {p.name for p in figures.glob("*.energy.png")} == {f"{s}.energy.png" for s in SITES}
    assert "timm:swinv2_tiny_window8_256" in page.read_text()
    again = cli("inspect", path, *ARCH, "--html", page)
    assert_error(again, 2, f"the report {page} exists", "choose another name for --html")
    again = cli("inspect", path, *ARCH, "--plot", figures)
    assert_error(again, 2, "is not empty", "choose another one for --plot")


def test_json_names_the_pictures(cli: Cli, tmp_path: Path) -> None:
    path, page = write_tiny(tmp_path / "x.safetensors"), tmp_path / "p.html"
    data = cli("inspect", path, *ARCH, "--html", page, "--json").json()
    assert data["html"] == str(page) and "figures" not in data


def test_sites_that_are_left_alone_can_be_looked_at(cli: Cli, tmp_path: Path) -> None:
    path, page = write_tiny(tmp_path / "x.safetensors"), tmp_path / "p.html"
    done = cli("inspect", path, *ARCH, "--exclude", "re:.*", "--html", page)
    assert done.code == 3 and "none of the 3 sites is worth converting" in done.err
    assert page.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html", "p.txt"], "must end in .html"),
        (["--html", "x.safetensors"], "would overwrite the checkpoint"),
        (["--html", "no/where.html"], "does not exist"),
        (["--plot", "x.safetensors"], "is not a folder"),
    ],
)
def test_names_that_make_no_sense(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "x.safetensors")
    assert_error(cli("inspect", "x.safetensors", *ARCH, *options), 2, message)
    assert files(tmp_path) == {"x.safetensors"}


def test_a_missing_matplotlib_is_told_before_all_work(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['matplotlib.figure'] = None\n"
        "from flashbias_convert.cli.app import run\n"
        f"sys.exit(run(['inspect', 'nowhere.pt', '--plot', {str(tmp_path / 'f')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: figures need matplotlib, which is not installed",
        "hint: pip install 'flashbias-convert[plot]'",
    ]
