"""The name of each language model with ALiBi."""

from __future__ import annotations

import pytest

from .models import NAMES


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
