"""What a row says of a failure."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.benchmark.rows import failure

WORKER = """An exception occurred in a subprocess:

Name=triton_flex_decoding
Traceback (most recent call last):
  File "worker.py", line 3, in do_job
    compile()
ValueError: first of two
During handling of the above exception, another exception occurred:
triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 300000

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""
KERNEL = """An exception occurred in a subprocess:

Name=triton_flex_decoding
triton.compiler.errors.CompilationError: at 184:20:
    x = tl.load(a)
    y = tl.dot(x, b)
        ^
Input shapes should be known
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("Tried to allocate"), "out of memory"),
        (ValueError("one\ntwo"), "ValueError: one"),
        (RuntimeError("backend='inductor' raised:\nOSError: no"),
         "RuntimeError: backend='inductor' raised: OSError: no"),
        (RuntimeError(WORKER), "RuntimeError: triton.runtime.errors.OutOfResources: "
         "out of resource: shared memory, Required: 300000"),
        (RuntimeError("SubprocException: An exception occurred in a subprocess:\n\nName=x"),
         "RuntimeError: SubprocException: An exception occurred in a subprocess:"),
        (RuntimeError(KERNEL), "RuntimeError: triton.compiler.errors.CompilationError: "
         "at 184:20: Input shapes should be known"),
        (KeyError(), "KeyError:"),
    ],
)  # fmt: skip
def test_a_failure_in_one_line(error: BaseException, reason: str) -> None:
    assert failure(error).strip() == reason


def test_a_long_reason_is_cut() -> None:
    assert failure(ValueError("x" * 1000)).endswith("x ...")
