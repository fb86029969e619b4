"""Backends and devices for the operator's tests.

The same tests run on a GPU where there is one. Without one, the kernel runs in Triton's
interpreter when TRITON_INTERPRET=1 is set; `make test` does both.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available() and not INTERPRETED


@pytest.fixture
def device() -> torch.device:
    """Where the tests' tensors live."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["eager", "sdpa", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; the kernel where it can run."""
    if request.param == "triton" and not (HAS_GPU or INTERPRETED):
        pytest.skip("the kernel needs a GPU or TRITON_INTERPRET=1")
    return str(request.param)


@pytest.fixture
def kernel() -> str:
    """The Triton backend, for tests that are about the kernel alone."""
    if not (HAS_GPU or INTERPRETED):
        pytest.skip("the kernel needs a GPU or TRITON_INTERPRET=1")
    return "triton"


@pytest.fixture(params=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype in turn."""
    if request.param == "bf16" and INTERPRETED:
        pytest.skip("Triton's interpreter takes bf16 for raw bits")
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[request.param]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the interpreter run only what the kernel takes part in; the rest has run without it."""
    if not INTERPRETED:
        return
    kept = [item for item in items if _uses_the_kernel(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _uses_the_kernel(item: pytest.Item) -> bool:
    if "tests/attention" not in item.nodeid or "test_interpreter" in item.nodeid:
        return True
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return "kernel" in getattr(item, "fixturenames", ()) or parameters.get("backend") == "triton"
