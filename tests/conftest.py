"""Settings for all tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

# the tensors are tiny: more threads only wait for each other, above all under pytest-xdist
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that ran in this process would go on writing to streams that are closed."""
    logger = logging.getLogger("flashbias_convert")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
