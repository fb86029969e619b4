"""The model card: what was measured, and nobody's README lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.checkpoint.card import model_card
from flashbias_convert.errors import CheckpointError, UsageError
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.plan import Plan, SitePlan

from .models import ARGS, NAME, write_tiny, write_tiny_folder
from .test_write import PLAN, WEIGHTS, names, no_space
from .test_write import write as write_module

ARCH = {"arch": f"timm:{NAME}", "arch_args": ARGS}


def rows(card: str) -> list[list[str]]:
    """The cells of the table, without its head."""
    lines = [line for line in card.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_a_card_beside_a_file_says_what_was_measured(tmp_path: Path) -> None:
    done = convert_checkpoint(write_tiny(tmp_path / "x.safetensors"), **ARCH, card=True)
    card = (tmp_path / "x.flashbias.md").read_text()
    assert 'load_model("x.flashbias.safetensors")' in card
    found = rows(card)
    assert [row[0] for row in found] == [f"`{site.name}`" for site in done.plan.sites]
    for row, site in zip(found, done.plan.sites, strict=True):
        assert row[1] == "64" and row[2] == str(site.heads)
        assert float(row[5]) == pytest.approx(100 * min(d.energy for d in site.decisions), abs=1e-3)
        worst = max(d.attention_error for d in site.decisions)
        assert float(row[8]) == pytest.approx(worst, abs=1e-3)


def test_without_the_option_there_is_no_card(tmp_path: Path) -> None:
    convert_checkpoint(write_tiny(tmp_path / "x.safetensors"), **ARCH)
    assert not list(tmp_path.glob("*.md"))


@pytest.mark.parametrize("size", [None, "40KB"])
def test_a_readme_of_the_source_is_kept(tmp_path: Path, size: str | None) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    output = convert_checkpoint(folder, card=True, max_shard_size=size).output
    assert output is not None
    assert (output / "README.md").read_text() == "about this model"
    assert 'load_model("m.flashbias")' in (output / "FLASHBIAS.md").read_text()


def test_a_folder_without_a_readme_gets_one(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    (folder / "README.md").unlink()
    output = convert_checkpoint(folder, card=True).output
    assert output is not None and "# m.flashbias" in (output / "README.md").read_text()


def test_a_note_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.safetensors")
    (tmp_path / "x.flashbias.md").write_text("precious")
    with pytest.raises(UsageError, match=r"x\.flashbias\.md exists"):
        convert_checkpoint(path, **ARCH, card=True)
    assert names(tmp_path) == ["x.flashbias.md", "x.safetensors"]
    convert_checkpoint(path, **ARCH, card=True, force=True)
    assert (tmp_path / "x.flashbias.md").read_text().startswith("---")


def test_a_disk_that_is_full_at_the_card_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_text

    def full(path: Path, *args: object, **kwargs: object) -> None:
        no_space() if ".md" in path.name else real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_module.write_file(tmp_path / "x.safetensors", WEIGHTS, PLAN, card="text")
    assert names(tmp_path) == []


def test_sites_that_stayed_and_warnings_are_told() -> None:
    site = SitePlan("a|b", "toy", "left alone", "too\nshort", n=4, m=6, warnings=("odd",))
    card = model_card(Plan(DecomposeOptions(), [site]), "in", "out.safetensors")
    assert "| `a\\|b` | 4 x 6 |" in card and "left alone: too short" in card
    assert "Warnings:\n\n- `a|b`: odd" in card
    assert "arch=..." in card
