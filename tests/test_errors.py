"""What errors look like, whatever they quote."""

from __future__ import annotations

import copy
import pickle

import pytest

from flashbias_convert.errors import (
    CheckpointError,
    FlashBiasError,
    StaleTermsError,
    UnknownArchitectureError,
    VerificationError,
    one_line,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("two\n\tlines ", "two lines"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("half a pair \ud800", "half a pair \\ud800"),
        ("right to left \u202e", "right to left \\u202e"),
    ],
)
def test_a_message_is_one_printable_line(text: str, shown: str) -> None:
    error = CheckpointError(text, text)
    assert error.message == shown and error.hint == shown
    assert str(error) == f"{shown} ({shown})"


def test_a_message_is_not_as_long_as_what_it_quotes() -> None:
    text = one_line("a" * 10_000 + "b" * 10_000)
    assert len(text) < 1300 and text.startswith("aaa") and text.endswith("bbb")
    assert len(str(FlashBiasError("x" * 10_000, "y" * 10_000))) < 2500


@pytest.mark.parametrize(
    "error",
    [
        StaleTermsError("the weights have changed", "patch again"),
        StaleTermsError("the weights have changed"),
        VerificationError("too far", "look closer", verification=(1, 2)),
        UnknownArchitectureError("which one?", "say so", candidates=("a", "b")),
    ],
)
def test_errors_cross_processes_as_they_are(error: FlashBiasError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error) and str(other) == str(error)
        assert (other.message, other.hint) == (error.message, error.hint)
        assert vars(other) == vars(error)
