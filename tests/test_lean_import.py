"""Importing the package is cheap, and its public names are there when asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import flashbias_convert

HEAVY = ("torch", "triton", "timm", "transformers", "typer", "rich", "numpy", "matplotlib")


def loaded_after(code: str, names: tuple[str, ...]) -> set[str]:
    """Which of `names` a fresh interpreter has imported after running `code`."""
    report = f"import sys; print(*({names!r} & sys.modules.keys()))".replace(
        repr(names), f"set({names!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_no_heavy_library() -> None:
    assert loaded_after("import flashbias_convert; dir(flashbias_convert)", HEAVY) == set()


def test_errors_load_no_heavy_library() -> None:
    assert loaded_after("from flashbias_convert import UsageError", HEAVY) == set()


def test_patching_a_model_needs_no_model_library() -> None:
    code = "from flashbias_convert import patch_model, inspect_model, ScoreBias"
    libraries = ("triton", "timm", "transformers", "typer", "rich")
    loaded_by_torch = loaded_after("import torch", libraries)
    assert loaded_after(code, libraries) == loaded_by_torch


def test_registering_is_what_loads_transformers() -> None:
    code = "from flashbias_convert import register_attention"
    assert "transformers" not in loaded_after(code, ("transformers",))
    assert loaded_after(f"{code}; register_attention()", ("transformers",)) == {"transformers"}


def test_the_probe_itself_notices_an_import() -> None:
    assert loaded_after("import numpy", HEAVY) == {"numpy"}


@pytest.mark.parametrize("name", flashbias_convert.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(flashbias_convert, name) is not None
    assert name in dir(flashbias_convert)


def test_the_lazy_names_are_the_public_ones() -> None:
    assert {*flashbias_convert._HOME, "__version__"} == set(flashbias_convert.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        flashbias_convert.nonsense  # noqa: B018
