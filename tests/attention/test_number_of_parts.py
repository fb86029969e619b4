"""How many programs share the keys of a row: a rule of sizes alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashbias_convert.attention import launch, parts
from flashbias_convert.attention.packing import GroupSpec
from flashbias_convert.attention.parts import number_of_parts

SIZES = {
    "programs": st.integers(1, 4096),
    "keys": st.integers(0, 2**20),
    "key_bytes": st.integers(16, 2048),
    "multiprocessors": st.integers(1, 200),
}


@given(**SIZES)
def test_limits(programs: int, keys: int, key_bytes: int, multiprocessors: int) -> None:
    sizes = {"programs": programs, "keys": keys, "key_bytes": key_bytes}
    found = number_of_parts(**sizes, multiprocessors=multiprocessors)
    assert 1 <= found <= parts.MOST_PARTS
    if found > 1:
        assert keys * key_bytes >= parts.SPLIT_BYTES
        assert found * parts.LEAST_KEYS <= keys
        assert found * parts.LEAST_BYTES <= keys * key_bytes
        assert found * programs <= parts.PROGRAMS_EACH * multiprocessors
    assert found == number_of_parts(**sizes, multiprocessors=multiprocessors)


@given(**SIZES)
def test_more_room_or_more_keys_never_make_fewer(
    programs: int, keys: int, key_bytes: int, multiprocessors: int
) -> None:
    def parts_of(programs: int, keys: int, multiprocessors: int) -> int:
        return number_of_parts(
            programs=programs, keys=keys, key_bytes=key_bytes, multiprocessors=multiprocessors
        )

    found = parts_of(programs, keys, multiprocessors)
    assert parts_of(programs, 2 * keys, multiprocessors) >= found
    assert parts_of(programs, keys, 2 * multiprocessors) >= found
    assert parts_of(2 * programs, keys, multiprocessors) <= found


@pytest.mark.parametrize(
    ("programs", "keys", "key_bytes", "expected"),
    [
        (50, 8192, 128, 5),  # a head of 32 in half precision: rooms for two programs each
        (32, 65536, 512, 8),
        (1, 65536, 512, 64),
        (1, 2048, 128, 4),
        (1, 2047, 128, 1),
        (32, 1024, 512, 8),
        (1, 128, 4096, 1),
        (256, 65536, 512, 1),
    ],
)
def test_examples_with_132_multiprocessors(
    programs: int, keys: int, key_bytes: int, expected: int
) -> None:
    assert number_of_parts(
        programs=programs, keys=keys, key_bytes=key_bytes, multiprocessors=132
    ) == expected  # fmt: skip


def test_which_calls_are_shared_out() -> None:
    def tensors(n: int, m: int, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
        q, k = (torch.empty(1, 50, rows, 32, dtype=dtype) for rows in (n, m))
        return {"q": q, "k": k, "v": k, "o": q}

    def found(given: dict[str, torch.Tensor], columns: int = 0) -> int:
        return launch.parts_for(GroupSpec(None, columns), given, 50)

    assert found(tensors(1, 8192)) == found(tensors(16, 8192)) == 5
    assert found(tensors(17, 8192)) == 1
    assert found(tensors(1, 1024)) == 1
    # what is read counts: wider numbers, and columns of factors
    assert found(tensors(1, 1024, torch.float32)) == found(tensors(1, 1024), columns=64) == 4
    for name in ("lse", "gate"):
        assert found({**tensors(1, 8192), name: torch.empty(0)}) == 1
        with launch.split_into(7):
            assert found({**tensors(1, 8192), name: torch.empty(0)}) == 1
            assert found(tensors(40, 100)) == 7


def test_other_devices_than_cards_have_the_usual_number() -> None:
    assert parts.multiprocessors_of(torch.device("cpu")) == parts.USUAL_MULTIPROCESSORS
