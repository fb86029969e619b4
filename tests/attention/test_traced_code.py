"""What Inductor generates for calls of few queries: without a card, up to the launch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .conftest import HAS_GPU, INTERPRETED

pytest.importorskip("triton")
if INTERPRETED or HAS_GPU:
    pytest.skip("pretends a card in a process of its own", allow_module_level=True)

SCRIPT = Path(__file__).with_name("code_without_card.py")
CASES = ("plain", "mask", "computed mask", "gate")


@cache
def generated() -> dict[str, Any]:
    """Code and kernels, by case."""
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *CASES], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {each["case"]: each for each in found}


@pytest.mark.parametrize("case", CASES)
def test_the_compiler_launches_the_kernels(case: str) -> None:
    found = generated()[case]
    code = found["code"]
    assert re.search(r"traced_attention_kernel_\d+\.run\(", code)
    assert "flashbias_convert.attention" not in code
    names = [kernel["name"] for kernel in found["kernels"]]
    shared_out = case != "gate"  # a gate belongs to the end of a row, which is then left whole
    assert names == ["traced_attention_kernel", *["traced_combine_kernel"] * shared_out]


@pytest.mark.parametrize("case", CASES)
def test_keys_are_read_as_vectors(case: str) -> None:
    """Sixteen bytes at a time: the compiler tells how pointers are aligned."""
    attention = generated()[case]["kernels"][0]
    assert len(re.findall(r"cp\.async\.cg\.shared\.global", attention["ptx"])) >= 4


@pytest.mark.parametrize(
    ("case", "kind"), [("mask", "*i1"), ("computed mask", "*i1"), ("plain", "constexpr")]
)
def test_masks_are_handed_on(case: str, kind: str) -> None:
    assert generated()[case]["kernels"][0]["signature"]["key_mask_ptr"] == kind


def test_one_copy_of_the_cache() -> None:
    """That which `index_copy` is: neither kernel makes more of what it reads."""
    code = generated()["plain"]["code"]
    assert len(re.findall(r"empty_strided_cuda\(\(1, 8, 2176, 64\)", code)) <= 1
