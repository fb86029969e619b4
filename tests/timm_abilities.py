"""What the installed version of timm can do: tests skip what an older one cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from packaging.version import Version

#: from here on nothing is skipped
COMPLETE = Version("1.0.31")
CUTS_ANY_MAP = "a shift mask for maps that the windows do not divide"
RESIZES = "set_input_size of this model"
REMEMBERS = "models that remember what they were built from"


def works(call: Callable[[], Any]) -> bool:
    """Whether timm does it without an error."""
    try:
        call()
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


def needs(able: bool, what: str) -> None:
    """Skip the test unless timm has the ability.

    Raises:
        AssertionError: it is missing in a version that had it.
    """
    import timm

    if able:
        return
    assert Version(timm.__version__) < COMPLETE, f"timm {timm.__version__} should have {what}"
    pytest.skip(f"timm {timm.__version__} lacks {what}")
