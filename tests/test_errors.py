"""What errors look like, whatever they quote."""

from __future__ import annotations

import pytest

from flashbias_convert.errors import CheckpointError, FlashBiasError, one_line


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
    assert error.args == (shown,) and error.hint == shown
    assert str(error) == f"{shown} ({shown})"


def test_a_message_is_not_as_long_as_what_it_quotes() -> None:
    text = one_line("a" * 10_000 + "b" * 10_000)
    assert len(text) < 1300 and text.startswith("aaa") and text.endswith("bbb")
    assert len(str(FlashBiasError("x" * 10_000, "y" * 10_000))) < 2500
