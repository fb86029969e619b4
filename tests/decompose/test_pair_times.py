"""Times to make a bias of pairs, and factors by networks: a table, and values between its rows."""

from __future__ import annotations

import pytest

from flashbias_convert.decompose import pair_times
from flashbias_convert.decompose.pair_times import Pairs, dense_ms, networks_ms, read_times

TABLE = """what,channels,heads,rank,n,ms,class
linear,10,4,0,100,1,x
linear,10,4,0,300,3,x
linear,10,8,0,100,2,x
linear,10,8,0,300,8,x
linear,30,4,0,100,2,x
linear,30,4,0,300,5,x
linear,30,8,0,100,3,x
linear,30,8,0,300,9,x
laying out,0,4,0,100,0.5,x
networks,10,4,16,100,4,x
networks,10,4,32,100,6,x
linear,10,4,0,100,99,y
"""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    times = read_times(TABLE, "x")
    monkeypatch.setattr(pair_times, "_table", lambda: times)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("channels", "heads", "n", "ms"),
    [
        (10, 4, 100, 1), (10, 4, 7, 1), (1, 1, 7, 1),  # the least is no less
        (10, 4, 200, 2), (10, 6, 200, 3.5), (20, 6, 200, (3.5 + 4.75) / 2),
        (10, 4, 600, 12), (10, 16, 100, 4), (60, 4, 100, 3.5),  # beyond
    ],
)  # fmt: skip
def test_between_rows(channels: int, heads: int, n: int, ms: float) -> None:
    assert dense_ms(Pairs(channels, "linear"), heads, n) == pytest.approx(ms)


@pytest.mark.usefixtures("table")
def test_ranks_and_what_is_only_laid_out() -> None:
    assert networks_ms(Pairs(10, "linear"), 4, 24, 100) == pytest.approx(5)
    assert networks_ms(Pairs(10, "linear"), 4, 64, 100) == pytest.approx(10)
    assert dense_ms(Pairs(77, "laying out"), 4, 100) == 0.5


def test_the_table_of_the_package_knows_all_kinds() -> None:
    for saves in ("laying out", "linear", "norm and linear"):
        for n in (16, 1024, 5000):
            assert 0 < dense_ms(Pairs(64, saves), 8, n) < dense_ms(Pairs(64, saves), 8, 2 * n + 600)
    assert 0 < networks_ms(Pairs(64, "linear"), 8, 96, 512) < 5


@pytest.mark.parametrize("text", [TABLE.replace("6,x", "nan,x"), "what,n\n", TABLE])
def test_no_such_table(text: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        read_times(text, "nobody's" if text == TABLE else "x")
