"""What attention takes at least, counted, and in what time a card does it."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import attention_floors as script
import row_file
from attention_shapes import SHAPES, Shape, tiny

from flashbias_convert.attention import backends
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape


@dataclasses.dataclass
class Rates:
    exponentials: float = 4e12
    products: float = 8e14
    cached: float = 5e12
    memory: float = 4e12


def counted(shape: Shape, block_m: int = 64, columns: int = 0, dense: bool = False) -> script.Work:
    launch = LaunchShape(shape.n, 64, 32, columns, True, ())
    return script.work(shape, launch, LaunchSettings(block_m, 64, 4, 3), 1000, dense)


def test_work_is_what_one_counts_by_hand() -> None:
    found = counted(Shape((2, 3), 4, 128, 64), columns=16)
    pairs = 2 * 3 * 4 * 128 * 128
    assert found.exponentials == pairs
    assert found.products == 2 * pairs * (64 + 32 + 16)
    assert found.cached == pairs / 64 * (64 + 32 + 16) * 2
    assert found.memory == 1000


def test_a_block_that_is_not_full_reads_as_much_as_others() -> None:
    full, more = counted(Shape((1,), 1, 128, 64)), counted(Shape((1,), 1, 130, 64))
    assert full.cached == 2 * 128 * (64 + 32) * 2
    assert more.cached == 3 * 130 * (64 + 32) * 2


@pytest.mark.parametrize("queries", [None, 1, 5])
def test_causal_pairs(queries: int | None) -> None:
    shape = Shape((1,), 1, 40, 64, options={"causal": True}, queries=queries)
    rows = range(40) if queries is None else range(40 - queries, 40)
    assert counted(shape).exponentials == sum(row + 1 for row in rows)


def test_few_rows_take_a_whole_product() -> None:
    few, all_of_it = (Shape((1,), 1, 4096, 64, queries=q) for q in (1, 16))
    assert counted(few).products == counted(all_of_it).products
    assert 16 * counted(few).exponentials == counted(all_of_it).exponentials


def test_a_dense_bias_is_read_by_every_pair() -> None:
    shape = Shape((1,), 1, 128, 64)
    assert counted(shape, dense=True).cached - counted(shape).cached == 128 * 128 * 2


@pytest.mark.parametrize(
    ("work", "limit"),
    [
        (script.Work(4e9, 1.0, 1.0, 1.0), "exponentials"),
        (script.Work(1.0, 8e11, 1.0, 1.0), "products"),
        (script.Work(1.0, 1.0, 5e9, 1.0), "cached"),
        (script.Work(1.0, 1.0, 1.0, 4e9), "memory"),
    ],
)
def test_the_floor_is_what_takes_longest(work: script.Work, limit: str) -> None:
    found = script.row("a", work, Rates(), {"a": 2.5})
    assert (found["floor_ms"], found["limit"], found["measured_ms"]) == ("1", limit, "2.5")
    assert script.row("b", work, Rates(), {"a": 2.5})["measured_ms"] == ""


@pytest.mark.parametrize("name", ["plain R=16", "triangle dense", "decode alibi", "t5 table"])
def test_shapes_are_counted_as_they_are_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    shape = tiny(SHAPES[name])
    found = script.of_shape(shape, torch.device("cpu"))
    rows = shape.queries or shape.n
    assert 0 < found.exponentials <= shape.heads * rows * shape.n
    width = 16 + 16 + (16 if "R=" in name else 0)  # factors are padded
    assert found.products == 2 * found.exponentials * max(rows, 16) / rows * width
    q, k, v = shape.inputs(torch.bfloat16, torch.device("cpu"))
    assert found.memory > sum(x.numel() for x in (q, k, v, q)) * 2


def test_times_are_those_of_our_kernel_on_the_card(tmp_path: Path) -> None:
    columns = ("shape", "peer", "median_ms", "state", "card")
    rows = [("a", "ours", "2", "ok", "x"), ("a", "other", "1", "ok", "x"),
            ("b", "ours", "3", "wrong", "x"), ("c", "ours", "4", "ok", "y")]  # fmt: skip
    file = tmp_path / "times.csv"
    row_file.write(file, columns, [dict(zip(columns, row, strict=True)) for row in rows])
    assert script.measured(file, "x") == {"a": 2.0}
    assert script.measured(tmp_path / "none.csv", "x") == {}


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "floors.csv"
    rows = [
        script.row(name, script.Work(4e9, 8e11, 1e9, 1e9), Rates(), {"a": 2.5}) for name in "ab"
    ]
    row_file.write(file, script.COLUMNS, [row | {"card": "a card"} for row in rows])
    script.draw(file)
    assert file.with_suffix(".png").stat().st_size > 10_000
    with file.open(newline="") as lines:
        assert [row["measured_ms"] for row in csv.DictReader(lines)] == ["2.5", ""]


def test_times_are_replaced_without_a_card(tmp_path: Path) -> None:
    floors, times = tmp_path / "floors.csv", tmp_path / "times.csv"
    rows = [
        {"shape": name, **{f"{limit}_ms": "0.5" for limit in script.LIMITS}, "floor_ms": "0.5",
         "limit": "memory", "measured_ms": "2", "card": "some"}
        for name in ("one", "other")
    ]  # fmt: skip
    row_file.write(floors, script.COLUMNS, rows)
    row_file.write(times, ("shape", "peer", "card", "state", "median_ms"), [
        {"shape": "one", "peer": "ours", "card": "some", "state": "ok", "median_ms": "1.25"},
        {"shape": "one", "peer": "flex", "card": "some", "state": "ok", "median_ms": "9"},
        {"shape": "other", "peer": "ours", "card": "another", "state": "ok", "median_ms": "9"},
    ])  # fmt: skip
    script.replace_times(floors, times)
    assert [row["measured_ms"] for row in row_file.read(floors)] == ["1.25", "2"]
    assert floors.with_suffix(".png").is_file()
