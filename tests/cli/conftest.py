"""Run the program in this process, and a converted file to look at."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashbias_convert.cli.app import run
from tests.checkpoint.models import ARCH, write_tiny


@dataclass(frozen=True)
class Result:
    """What a run of the program left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one JSON value on stdout."""
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Run ``flashbias-convert`` with arguments."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    yield call
    logging.captureWarnings(False)
    for name in ("flashbias_convert", "py.warnings"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted file; do not change it."""
    path = write_tiny(tmp_path_factory.mktemp("cli") / "tiny.safetensors")
    assert run([str(path), *ARCH, "-q"]) == 0
    return path.with_name("tiny.flashbias.safetensors")
