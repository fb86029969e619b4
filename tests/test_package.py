"""What is installed is what is in the tree."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import flashbias_convert
from flashbias_convert.recipe import GROUP, Recipe

pytest.importorskip("build")
pytest.importorskip("setuptools")

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
RECIPE_FILES = sorted(p.stem for p in (ROOT / "recipes").glob("*.py") if p.stem != "__init__")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy because building leaves files behind."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("flashbias_convert", "recipes"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    return built


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files_of_the_tree() -> set[str]:
    kinds = (".py", ".typed", ".css", ".js", ".csv")
    own = [p for p in (ROOT / "flashbias_convert").rglob("*") if p.suffix in kinds]
    files = {p.relative_to(ROOT).as_posix() for p in own}
    recipes = (ROOT / "recipes").rglob("*.py")
    return files | {f"flashbias_convert/{p.relative_to(ROOT).as_posix()}" for p in recipes}


def test_the_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    assert files_of(wheel) == files_of_the_tree()


def test_files_in_the_wheel_are_those_of_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in ("flashbias_convert/recipe.py", "flashbias_convert/recipes/timm_swinv2.py"):
            source = ROOT / name.replace("flashbias_convert/recipes/", "recipes/")
            assert archive.read(name) == source.read_bytes()


def test_the_wheel_declares_command_recipes_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        declared = archive.read(entry_points).decode()
    assert "flashbias-convert = flashbias_convert.cli:main" in declared
    for name, target in PROJECT["project"]["entry-points"][GROUP].items():
        assert f"{name} = {target}" in declared
    assert any(n.endswith("/LICENSE") for n in names)


@pytest.mark.parametrize("name", RECIPE_FILES)
def test_every_class_of_a_recipe_has_an_entry_point(name: str) -> None:
    recipe = importlib.import_module(f"flashbias_convert.recipes.{name}").recipe
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    target = f"flashbias_convert.recipes.{name}:recipe"
    declared = {c for c, t in PROJECT["project"]["entry-points"][GROUP].items() if t == target}
    assert declared == set(recipe.classes)


def test_every_entry_point_leads_to_a_recipe_file() -> None:
    targets = set(PROJECT["project"]["entry-points"][GROUP].values())
    assert targets == {f"flashbias_convert.recipes.{name}:recipe" for name in RECIPE_FILES}


def test_the_oldest_timm_is_one_that_its_recipes_were_tested_with() -> None:
    needed = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    (timm,) = (one.specifier for one in needed if one.name == "timm")
    (oldest,) = (part.version for part in timm if part.operator == ">=")
    names = [name for name in RECIPE_FILES if name.startswith("timm_")]
    recipes = [importlib.import_module(f"flashbias_convert.recipes.{n}").recipe for n in names]
    assert recipes and all(SpecifierSet(recipe.tested).contains(oldest) for recipe in recipes)


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    version = PROJECT["project"]["version"]
    assert flashbias_convert.__version__ == version
    assert wheel.name.startswith(f"flashbias_convert-{version}-")
