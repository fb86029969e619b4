"""Backends and devices for the operator's tests.

The same tests run on a GPU where there is one. Without one, the kernel runs in Triton's
interpreter when TRITON_INTERPRET=1 is set; `make test` does both.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available() and not INTERPRETED


def spare_the_interpreter() -> None:
    """Let Triton's interpreter replace the language once per launch, not at every call.

    It does so whenever one device function calls another, which takes half of the time.
    """
    from triton.runtime import interpreter

    launch, replaced = interpreter.GridExecutor.__call__, set()

    def first_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in replaced:
            interpreter._patch_lang(self.fn)
            replaced.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = first_call
    interpreter.InterpretedFunction.__call__ = call


if INTERPRETED:
    spare_the_interpreter()


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


@pytest.fixture(params=["fp16", "bf16"])
def half(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """fp16 and, on a card, bf16."""
    if request.param == "bf16" and device.type == "cpu":
        pytest.skip("Triton's interpreter takes bf16 for raw bits")
    return torch.float16 if request.param == "fp16" else torch.bfloat16


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
