"""Which lack of memory is a result, and which may be that of others on the card."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from failures import is_lost, lacked_beside_others, no_row
from turns import BESIDE


def message(asked: str, in_use: str | None, allocated: str, total: str = "139.72 GiB") -> str:
    """As `CUDACachingAllocator.cpp` writes it."""
    used = "" if in_use is None else (
        f"Including non-PyTorch memory, this process has {in_use} memory in use. "
    )  # fmt: skip
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of "
        f"which 11.06 GiB is free. {used}Of the allocated memory {allocated} is allocated by "
        "PyTorch, and 94.01 MiB is reserved by PyTorch but unallocated. If reserved but ..."
    )


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BESIDE, "/nowhere")


@pytest.mark.parametrize(
    ("text", "others"),
    [
        (message("20.00 GiB", "30.00 GiB", "29.00 GiB"), True),
        (message("512.00 MiB", None, "29.00 GiB"), True),
        (message("256.00 GiB", "600.00 MiB", "0 bytes"), False),
        (message("100.00 GiB", "60.00 GiB", "59.00 GiB"), False),
        (message("100.00 GiB", None, "59.00 GiB"), False),
        # what torch does not know of counts, too: the context of CUDA
        (message("70.00 GiB", "70.00 GiB", "69.50 GiB"), False),
        (message("70.00 GiB", None, "69.50 GiB"), True),
        # nor what its allocator keeps
        (message("70.20 GiB", None, "69.50 GiB"), False),
        # exactly the card, but for the rounding of the message
        (message("69.72 GiB", "70.00 GiB", "69.50 GiB"), True),
        (message("4.00 KiB", "23.99 GiB", "1.00 GiB", total="24.00 GiB"), True),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", False),
        ("CUDA out of memory", True),
    ],
)
def test_what_the_whole_card_lacks_is_a_result(text: str, others: bool) -> None:
    assert lacked_beside_others(torch.OutOfMemoryError(text)) == others


@pytest.mark.parametrize(
    ("problem", "others"),
    [
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("out of resource: shared memory, Required: 262144"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("a rank of 300"), False),
    ],
)
def test_of_others_that_speak_of_memory(problem: Exception, others: bool) -> None:
    assert lacked_beside_others(problem) == others


def test_what_a_compiler_has_caught() -> None:
    def compiled(text: str) -> Exception:
        try:
            try:
                raise torch.OutOfMemoryError(text)
            except torch.OutOfMemoryError as problem:
                raise RuntimeError("the backend failed") from problem
        except RuntimeError as wrapped:
            return wrapped

    assert lacked_beside_others(compiled("CUDA out of memory"))
    assert not lacked_beside_others(compiled(message("256.00 GiB", "1.00 GiB", "0 bytes")))


def test_who_has_the_card_alone_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BESIDE)
    assert not lacked_beside_others(torch.OutOfMemoryError("CUDA out of memory"))


def test_cards_that_are_lost() -> None:
    assert is_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_lost(torch.OutOfMemoryError("CUDA out of memory"))


def test_what_is_told() -> None:
    said = no_row("sdpa, N = 8", torch.OutOfMemoryError("CUDA out of memory.\nmore"))
    assert said == "sdpa, N = 8: no row, memory lacked beside other commands (CUDA out of memory.)"
