"""What `bench_lengths.py` measures, how its causal matrix is made, and the table for the paper."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "paper"))

import attention_speed
import bench_lengths
import row_file
from attention_peers import _call
from bench_lengths import SERIES, Series, jobs

from flashbias_convert.benchmark.peers import dense_mask

CPU = torch.device("cpu")
ROWS = [
    ("ours", 1, "2.0", "ok"),
    ("ours, sdpa path", 1, "0.5", "ok"),
    ("flex, dense", 1, "5.0", "ok"),
    ("cudnn, dense", 1, "1.0", "wrong"),
    ("flash, no bias", 0, "3.0", "ok"),
]


@pytest.mark.parametrize("with_causal", [True, False])
@pytest.mark.parametrize("name", SERIES)
def test_the_matrix_made_by_head_is_that_of_all_others(name: str, with_causal: bool) -> None:
    shape = SERIES[name].shape(24)
    assert shape.bias is not None
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.float32, CPU)
    call = _call(shape, q, k, v, shape.bias(shape, CPU))
    seen = torch.ones(24, 24, dtype=torch.bool)
    seen = seen.tril() if SERIES[name].causal else seen
    made, right = (
        make(call, with_causal=with_causal).expand(shape.heads, 24, 24)
        for make in (bench_lengths.dense, dense_mask)
    )
    hidden = -torch.inf if with_causal else 0.0
    for x in (made, right):
        assert (x[:, ~seen] == hidden).all() and x[:, seen].isfinite().all()
    # up to a number for each row, which a softmax does not see
    apart = (made - right).masked_fill(~seen, 0.0)
    first = apart[:, :, :1].expand_as(apart).masked_fill(~seen, 0.0)
    torch.testing.assert_close(apart, first, rtol=0.0, atol=1e-5)


def test_long_matrices_come_last_and_alone(tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    row_file.begin(output, bench_lengths.FIELDS, resume=False)
    lengths = [1024, 65536]
    found = jobs(["plain", "causal"], lengths, None, output)
    assert [job.long for job in found] == sorted(job.long for job in found)
    alone = {(job.series, job.n, job.names) for job in found if job.long}
    dense = [("efficient, dense",), ("cudnn, dense",), ("flex, dense",)]
    assert alone == {(name, 65536, names) for name in ("plain", "causal") for names in dense}
    every = {(job.series, job.n, name) for job in found for name in job.names}
    assert every == {
        (name, n, peer) for name in ("plain", "causal") for n in lengths
        for peer in SERIES[name].names(None)
    }  # fmt: skip
    row_file.append(output, bench_lengths.FIELDS, {"series": "causal", "n": 1024, "peer": "ours"})
    again = {(j.series, j.n, p) for j in jobs(["plain", "causal"], lengths, None, output)
             for p in j.names}  # fmt: skip
    assert every - again == {("causal", 1024, "ours")}


def test_a_kernel_from_a_file_is_never_causal() -> None:
    assert [x for x in SERIES if "mine" in SERIES[x].names("mine")] == [
        x for x, series in SERIES.items() if not series.causal
    ]


def test_the_table_has_the_best_right_ones_beside_ours() -> None:
    rows = [
        {"series": "non-causal", "n": "2048", "peer": peer, "has_bias": str(has),
         "median_ms": ms, "memory_mib": "7.5", "state": state}
        for peer, has, ms, state in ROWS
    ]  # fmt: skip
    last = attention_speed.table(rows).splitlines()[-1]
    title, matrix = SERIES["non-causal"].title, f"{4 * 2048**2 * 2 / 2**20:,.0f}"
    assert last == (
        f"| {title} | 2,048 | 2 | 2.50x (flex, dense) | 1.50x (flash, no bias) | 7.5 | {matrix} |"
        f" {attention_speed.PAPER['non-causal']} |"
    )
    assert len(attention_speed.table([r for r in rows if r["peer"] != "ours"]).splitlines()) == 2


def test_pictures_are_drawn_of_all_series(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "rows.csv"
    states = ("ok", bench_lengths.OUT_OF_MEMORY, "crashed")
    rows = [
        {"series": name, "n": n, "peer": peer, "median_ms": 1.0, "memory_mib": 2.0, "state": state,
         "card": "none"}
        for name in ("plain", "causal") for n in (256, 512)
        for peer, state in zip(("ours", "cudnn, dense", "a kernel"), states, strict=True)
    ]  # fmt: skip
    row_file.write(file, bench_lengths.FIELDS, rows)
    bench_lengths.draw(file)
    assert file.with_suffix(".png").stat().st_size > 10_000


def test_a_series_is_a_shape_of_the_benchmark() -> None:
    series = Series("some", 2, 3, 8, SERIES["causal"].bias, causal=True)
    shape = series.shape(40)
    q, _, _ = shape.inputs(torch.float32, CPU)
    assert q.shape == (2, 3, 40, 8) and shape.options == {"causal": True}
