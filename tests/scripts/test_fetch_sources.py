"""The script that fetches source files, from a repository that is made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashbias_convert.recipe import Registry
from scripts import fetch_sources as script


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a repository of two commits, the first of which is wanted."""
    place = tmp_path / "mirror" / "someone+thing"
    (place / "inner").mkdir(parents=True)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(place), *identity, *arguments],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return run.stdout.strip()

    git("init", "--quiet")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    git("config", "uploadpack.allowFilter", "true")
    for text in ("wanted", "newer"):
        (place / "LICENSE").write_text("free")
        (place / "inner" / "file.py").write_text(text)
        (place / "large").write_text(text * 1000)
        git("add", ".")
        git("commit", "--quiet", "-m", text)
    commit = git("rev-parse", "HEAD~")
    source = script.Source("someone/thing", commit, ("LICENSE", "inner/file.py"))
    monkeypatch.setattr(script, "SOURCES", (source,))
    return place.parent


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_files_of_the_commit_come_and_no_others(mirror: Path, tmp_path: Path, scheme: str) -> None:
    folder, (source,) = tmp_path / "sources", script.SOURCES
    assert not script.is_complete(folder)
    assert script.fetch(folder, f"{scheme}{mirror}/{{owner}}+{{name}}") == folder
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    below = f"someone/thing/{source.commit[:12]}"
    assert found == {f"{below}/LICENSE", f"{below}/inner/file.py"}
    assert (folder / below / "inner" / "file.py").read_text() == "wanted"
    assert script.is_complete(folder)


def test_what_is_there_is_left_and_a_part_is_completed(mirror: Path, tmp_path: Path) -> None:
    folder, (source,) = tmp_path / "sources", script.SOURCES
    script.fetch(folder, f"{mirror}/{{owner}}+{{name}}")
    script.fetch(folder, "/nowhere/{owner}")
    (source.within(folder) / "LICENSE").unlink()
    assert not script.is_complete(folder)
    script.fetch(folder, f"{mirror}/{{owner}}+{{name}}")
    assert script.is_complete(folder)


def test_a_missing_file_leaves_nothing(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = script.SOURCES
    wrong = script.Source(source.repository, source.commit, ("LICENSE", "inner/other.py"))
    monkeypatch.setattr(script, "SOURCES", (wrong,))
    with pytest.raises(subprocess.CalledProcessError):
        script.fetch(tmp_path / "sources", f"{mirror}/{{owner}}+{{name}}")
    assert not any(p.is_file() for p in (tmp_path / "sources").rglob("*"))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("jaketae_alibi", script.ALIBI),
        ("mosaic_bert", script.MOSAIC),
        ("gated_audio", script.UNILM),
        ("gated_wavlm", script.UNILM),
    ],
)
def test_recipes_say_which_commit_they_are_tested_with(name: str, source: script.Source) -> None:
    about = Registry().by_name(name).about
    assert about is not None
    assert f"github.com/{source.repository} at {source.commit[:8]}" in about.tested


def test_every_source_is_pinned_with_its_licence() -> None:
    for source in (script.ALIBI, script.MOSAIC, script.UNILM):
        assert len(source.commit) == 40 and int(source.commit, 16) >= 0
        assert "LICENSE" in source.files
        url = source.url(script.GITHUB)
        assert url == f"https://github.com/{source.repository}.git"
