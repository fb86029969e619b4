"""Fixtures of conversions shard by shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashbias_convert.checkpoint import streaming

from .shards import LAYOUTS


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are copied from now on."""
    found: list[str] = []
    real = streaming.copy_pieces

    def spy(source: Any, pieces: Any, path: Path, *args: Any) -> Any:
        found.append(path.name)
        return real(source, pieces, path, *args)

    monkeypatch.setattr(streaming, "copy_pieces", spy)
    return found
