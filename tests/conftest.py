"""Settings for all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Triton's interpreter multiplies with NumPy. Cards, and OpenBLAS's kernels for AVX2, add up a
# product and that of the transposed factors in the same order, which the backward pass in fp32
# relies on; those for AVX-512 do not. It has to be said before NumPy is loaded
_CPU = Path("/proc/cpuinfo")
if os.environ.get("TRITON_INTERPRET") == "1" and _CPU.is_file() and "avx512f" in _CPU.read_text():
    os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")

import pytest  # noqa: E402
import torch  # noqa: E402

from flashbias_convert.decompose import costs  # noqa: E402

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


@pytest.fixture
def dear_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense bias costs more than factors of any rank, also for the few tokens of a test."""
    measured = costs.time_per_score

    def dearer(form: str, *sizes: Any) -> float:
        return measured(form, *sizes) + 10 * (form == "dense")

    monkeypatch.setattr(costs, "time_per_score", dearer)


@pytest.fixture
def free_factors(monkeypatch: pytest.MonkeyPatch, dear_matrices: None) -> None:
    """Factors made once pay in the smallest of models: it takes no time to make them."""
    monkeypatch.setattr("flashbias_convert.decompose.serving.factors_ms", lambda *_: 0.0)
