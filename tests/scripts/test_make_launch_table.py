"""The table of launch settings: every shape has some, and a script makes it of measurements."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

pytest.importorskip("triton")

import make_launch_table  # noqa: E402

from flashbias_convert.attention.launch_table import (  # noqa: E402
    TABLE,
    entry_of,
    launch_settings,
    launch_table,
    parse_table,
)
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape  # noqa: E402

TERMS: tuple[tuple[str, ...], ...] = (
    (), ("slopes",), ("table", "codes_q", "codes_k"), ("table", "codes_q", "codes_k", "slopes"),
    ("lookup", "lookup_code"), ("dense",), ("ids", "key_ids"),
)  # fmt: skip


def shapes() -> list[LaunchShape]:
    """Of every kind."""
    lengths = (1, 16, 17, 64, 144, 196, 300, 512, 576, 640, 1024, 1100, 4096)
    sizes = (16, 32, 64, 128, 256)
    every = product(lengths, sizes, (0, 16, 48, 128), (True, False), TERMS)
    found = [LaunchShape(n, d, d, columns, half, terms) for n, d, columns, half, terms in every]
    return found + [replace(s, shared=True) for s in found if s.terms == ("dense",)]


def test_every_shape_has_settings_and_every_row_has_shapes() -> None:
    hit = {entry_of(shape).of.name for shape in shapes()}
    assert hit == {entry.of.name for entry in launch_table()}
    assert len(hit) == len(launch_table())  # names are unique


def test_settings_of_kinds_of_shapes() -> None:
    def of(n: int, d: int, *terms: str, columns: int = 0, half: bool = True) -> LaunchSettings:
        return launch_settings(LaunchShape(n, d, d, columns, half, terms))

    assert of(8192, 64, columns=16) == LaunchSettings(128, 64, 8, 3, 128)
    assert of(144, 64, columns=16) == LaunchSettings(64, 32, 4, 3, 96)
    assert of(1, 64, "slopes") == LaunchSettings(16, 128, 4, 3)
    assert of(8192, 64, half=False) == LaunchSettings(32, 32, 4, 2)
    assert of(8192, 128) == LaunchSettings(128, 64, 8, 3)
    assert of(8192, 128, "table", "codes_q", "codes_k") == LaunchSettings(64, 64, 4, 2)


def test_the_table_says_what_the_committed_measurements_confirm() -> None:
    before = launch_table()
    after = make_launch_table.made(
        before, *make_launch_table.read_times(make_launch_table.MEASURED)
    )
    kept = make_launch_table.confirmed(before, after)
    text = Path(str(TABLE)).read_text("utf-8")
    assert make_launch_table.written(text, kept) == text
    assert sum(bool(entry.measured) for entry in kept) >= 10


NOW, FAST, ELSEWHERE = (LaunchSettings(64, n, 4, 3) for n in (16, 32, 64))


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([{NOW: 1.0, FAST: 0.9}], FAST),
        ([{NOW: 1.0, FAST: 0.995}], NOW),  # not worth it
        ([{NOW: 1.0, FAST: 0.5}, {NOW: 1.0, FAST: 2.5}], NOW),  # fast at one shape of two
        ([{NOW: 1.0, FAST: 0.9}, {NOW: 1.0, ELSEWHERE: 0.1}], NOW),  # not measured at both
        ([{FAST: 1.0, ELSEWHERE: 2.0}], FAST),  # the present ones were not measured, or failed
        ([{FAST: 1.0}, {ELSEWHERE: 1.0}], NOW),
    ],
)
def test_the_fastest_at_all_shapes_of_a_class(
    times: list[dict[LaunchSettings, float]], chosen: LaunchSettings
) -> None:
    assert make_launch_table.best(NOW, times) == chosen


def test_a_table_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of one shape; rows that failed do not count, and other rows of the table stay."""
    fast = LaunchSettings(128, 128, 8, 3)
    measured = tmp_path / "measured.csv"
    header = "shape,block_m,block_n,num_warps,num_stages,max_registers,entries,ms,state,card\n"
    measured.write_text(
        f"{header}d128 R=16,128,64,8,3,,1,1.0,ok,a card\nd128 R=16,128,128,8,3,,1,0.8,ok,a card\n"
        "d128 R=16,64,64,4,2,,1,,failed,a card\n"
    )
    table = tmp_path / "table.csv"
    table.write_text(Path(str(TABLE)).read_text("utf-8"))
    words = ["x", "--measured", str(measured), "--output", str(table)]
    monkeypatch.setattr(sys, "argv", [*words, "--check"])
    with pytest.raises(SystemExit, match="1"):
        make_launch_table.main()
    assert table.read_text() == Path(str(TABLE)).read_text("utf-8")
    monkeypatch.setattr(sys, "argv", words)
    make_launch_table.main()
    for old, new in zip(launch_table(), parse_table(table.read_text()), strict=True):
        if old.of.name == "D=128":
            assert (new.settings, new.measured, new.card) == (fast, ("d128 R=16",), "a card")
        else:
            assert (new.of, new.settings) == (old.of, old.settings)
    monkeypatch.setattr(sys, "argv", [*words, "--check"])
    with pytest.raises(SystemExit, match="0"):
        make_launch_table.main()
