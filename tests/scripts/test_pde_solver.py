"""The script of the PDE solver: its surfaces and fields, and runs of the smallest size."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS / "paper"), str(SCRIPTS)]

import pde_bench  # noqa: E402
import pde_peers  # noqa: E402
import pde_solver as script  # noqa: E402
import pde_table  # noqa: E402
import pde_task  # noqa: E402
import pde_training  # noqa: E402
from turns import BESIDE  # noqa: E402

from .turns_here import in_turns_here  # noqa: E402

#: a cube of sides 2 around (5, 0, 0), its faces squares
CORNERS = [(x, y, z) for x in (4, 6) for y in (-1, 1) for z in (-1, 1)]
FACES = ["0 1 3 2", "4 5 7 6", "0 1 5 4", "2 3 7 6", "0 2 6 4", "1 3 7 5"]


@pytest.fixture
def cube(tmp_path: Path) -> Path:
    header = ["ply", "format ascii 1.0", "element vertex 8", "property float x",
              "property float y", "property float z", "property float confidence",
              "element face 6", "property list uchar int vertex_indices", "end_header"]  # fmt: skip
    rows = [f"{x} {y} {z} 0.5" for x, y, z in CORNERS] + [f"4 {face}" for face in FACES]
    path = tmp_path / "cube.ply"
    path.write_text("\n".join(header + rows) + "\n")
    return path


def test_points_lie_on_the_surface_and_everywhere_on_it(cube: Path) -> None:
    points = pde_task.surface_points(cube, 6000, 0)
    assert points.shape == (6000, 3) and points.dtype == torch.float32
    side = 3**-0.5  # of the cube whose corners lie on the unit sphere
    largest = points.abs().max(-1)
    assert torch.allclose(largest.values, torch.full((6000,), side), atol=1e-6)
    faces = torch.bincount(largest.indices * 2 + (points.gather(1, largest.indices[:, None])
                                                  > 0).long()[:, 0], minlength=6)  # fmt: skip
    assert (faces - 1000).abs().max() < 5 * (6000 * 5 / 36) ** 0.5  # five standard deviations
    assert torch.equal(points, pde_task.surface_points(cube, 6000, 0))
    assert not torch.equal(points, pde_task.surface_points(cube, 6000, 1))


def test_points_of_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "points.npy", np.random.default_rng(0).normal(size=(50, 3)) + 7)
    points = pde_task.surface_points(tmp_path / "points.npy", 40, 0)
    assert points.shape == (40, 3) and points.norm(dim=1).max() <= 1 + 1e-6
    with pytest.raises(SystemExit, match="50 points, 60 are needed"):
        pde_task.surface_points(tmp_path / "points.npy", 60, 0)


def test_fields_solve_the_helmholtz_equation() -> None:
    task, step = pde_task.Task(wavenumber=5.0), 1e-3
    centre = torch.rand(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = [centre + sign * step * axis for axis in torch.eye(3).double() for sign in (-1, 1)]
    points = torch.cat([centre, *moved])
    # waves are drawn in fp32 unless the default is wider
    torch.set_default_dtype(torch.float64)
    try:
        inputs, field = task.fields(points, 3, torch.Generator().manual_seed(0))
    finally:
        torch.set_default_dtype(torch.float32)
    around = field[..., 0].unflatten(1, (7, 20))
    laplacian = (around[:, 1:].sum(1) - 6 * around[:, 0]) / step**2
    assert torch.allclose(laplacian, -25.0 * around[:, 0], rtol=1e-3, atol=1e-3)
    known = inputs[..., 1:]
    assert set(known.unique().tolist()) <= {0.0, 1.0} and known.any()
    assert torch.equal(inputs[..., :1], field * known)


def test_every_peer_that_runs_here_computes_the_same(cube: Path) -> None:
    points = pde_task.surface_points(cube, 40, 0)[None]
    plain = pde_peers.errors(pde_peers.plain, points, 2, 8, torch.float32)
    for name in (pde_peers.OURS, pde_peers.SDPA):
        found = pde_peers.errors(pde_peers.PEERS[name](), points, 2, 8, torch.float32)
        # a bias of up to 256 in fp32
        assert all(a <= 2 * b + 256 * 2**-23 for a, b in zip(found, plain, strict=True)), name
    wrong = pde_peers.errors(pde_peers.without_bias, points, 2, 8, torch.float32)
    assert min(wrong) > 0.1


def test_surfaces_without_a_file() -> None:
    for name in pde_task.SURFACES:
        points = pde_task.surface_points(name, 20_000, 0)
        assert points.shape == (20_000, 3) and points.dtype == torch.float32
        assert torch.equal(points, pde_task.surface_points(name, 20_000, 0))
    sphere, torus = (pde_task.surface_points(x, 20_000, 0).double() for x in ("sphere", "torus"))
    assert torch.allclose(sphere.norm(dim=1), torch.ones(20_000).double(), atol=1e-6)
    tube, torus = pde_task.TUBE, torus * (1 + pde_task.TUBE)
    ring = torus[:, :2].norm(dim=1) - 1
    assert torch.allclose(ring**2 + torus[:, 2] ** 2, torch.full_like(ring, tube**2), atol=1e-6)
    # by area: half of the points and (2 r / pi R) / 2 more lie outside of the ring of radius R
    expected = 0.5 + tube / math.pi
    outside = float((ring > 0).double().mean())
    assert abs(outside - expected) < 5 * (expected * (1 - expected) / 20_000) ** 0.5
    assert sphere.mean(0).abs().max() < 5 * (1 / 3 / 20_000) ** 0.5


@pytest.mark.parametrize("suffix", ["glb", "ply"])
def test_a_mesh_that_trimesh_reads(suffix: str, tmp_path: Path) -> None:
    trimesh = pytest.importorskip("trimesh")
    path = tmp_path / f"box.{suffix}"
    path.write_bytes(trimesh.creation.box((2.0, 2.0, 2.0)).export(file_type=suffix))
    points = pde_task.surface_points(path, 500, 0)
    side = torch.full((500,), 3**-0.5)  # of the cube whose corners lie on the unit sphere
    assert torch.allclose(points.abs().max(-1).values, side, atol=1e-6)


def test_a_mesh_that_needs_trimesh_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trimesh", None)
    with pytest.raises(SystemExit, match="torus, sphere need no file"):
        pde_task.surface_points(tmp_path / "car.glb", 10, 0)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pde_bench, "in_turns", in_turns_here)


def run(monkeypatch: pytest.MonkeyPatch, *words: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
    script.main()


SIZES = ("--layers", 1, "--backend", "sdpa", "--device", "cpu", "--dtype", "float32")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_run_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    short = ("--points", 32, "--steps", 3, "--check-every", 2, "--fields", 2)
    run(monkeypatch, "train", *short, *SIZES, "--output", tmp_path)
    rows = rows_of(tmp_path / "pde_solver.csv")
    assert [row["model"] for row in rows] == [pde_training.WITH, pde_training.WITHOUT]
    for row in rows:
        assert 0 < float(row["error"]) < 10 and row["points"] == "32" and row["steps"] == "3"
        assert row["surface"] == "torus"
    assert (tmp_path / "pde_solver.png").stat().st_size > 0
    told = (tmp_path / "pde_solver.md").read_text()
    assert f"{float(rows[0]['error']):.4f}" in told and "15.8%" in told


def test_training_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models get the steps for which the first one had time."""
    clock = iter(range(10**6))
    monkeypatch.setattr(pde_training.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(pde_training, "draw", lambda *_: None)
    short = ("--points", 16, "--check-every", 100, "--fields", 1, "--minutes", 0.3)
    run(monkeypatch, "train", "sphere", *short, *SIZES, "--output", tmp_path)
    steps = [int(row["steps"]) for row in rows_of(tmp_path / "pde_solver.csv")]
    assert steps == [9, 9]  # each has nine seconds, and looks at the clock once a step


def test_the_learning_rate_goes_up_and_down() -> None:
    rates = [pde_training.rate(i / 100) for i in range(100)]
    top = rates.index(max(rates))
    assert top == 100 * pde_training.WARM and rates[top] == 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[-1] < 1e-3 and rates[0] > 0


def test_a_run_of_the_clock(tmp_path: Path, cube: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def dies() -> Any:
        raise SystemExit(1)

    monkeypatch.setitem(pde_bench.PEERS, pde_peers.FLEX, fails)
    monkeypatch.setitem(pde_bench.PEERS, pde_peers.FLEX_DENSE, dies)
    kernel = tmp_path / "halves.py"
    kernel.write_text(KERNEL)
    short = ("--points", 24, 32, "--repeats", 3, "--kernel", kernel, "--output", tmp_path)
    run(monkeypatch, "bench", cube, *short, *SIZES)
    rows = rows_of(tmp_path / "pde_solver_speed.csv")
    assert len(rows) == 2 * 2 * (len(pde_peers.PEERS) + 1)
    states = {pde_peers.FLEX: pde_bench.OUT_OF_MEMORY, pde_peers.FLEX_DENSE: pde_bench.CRASHED}
    correct = {pde_peers.NO_BIAS: "no bias", "halves": "False"}
    for row in rows:
        assert row["status"] == states.get(row["peer"], "ok")
        assert bool(row["median_ms"]) == (row["status"] == "ok")
        if row["status"] == "ok":
            assert row["correct"] == correct.get(row["peer"], "True"), row
    told = (tmp_path / "pde_solver_speed.md").read_text()
    assert "OOM" in told and "(wrong)" in told and "paper, A100: FlashBias" in told
    run(monkeypatch, "bench", cube, *short, *SIZES, "--resume")
    assert rows_of(tmp_path / "pde_solver_speed.csv") == rows
    run(monkeypatch, "bench", cube, *short, *SIZES, "--stop-s", -1)
    assert not rows_of(tmp_path / "pde_solver_speed.csv")


#: rounds its factors to half precision, as the signature says
KERNEL = """
import torch
def attn(q, k, v, pq, pk):
    bias = (pq.float() @ pk.float().mT) * torch.log(torch.tensor(2.0))
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v
"""


def test_the_table_has_the_shape_of_the_papers() -> None:
    rows = [{"peer": p, "points": str(n), "phase": phase, "status": "ok", "correct": c,
             "peak_mib": "1024", "s_per_100": ms, "median_ms": ms, "layers": "8", "dtype": "x",
             "device": "y"}
            for p, c, ms in (("flashbias", "True", "2"), ("a", "True", "5"), ("b", "False", "1"))
            for n in pde_table.PAPER_SIZES for phase in pde_table.PHASES]  # fmt: skip
    table = pde_table.cells(rows)
    assert table["flashbias"] == ["1.00 / 2.00"] * 6
    assert table["b"] == ["1.00 / 1.00 (wrong)"] * 6
    assert table["paper, A100: FlashBias"] == list(pde_table.PAPER["FlashBias"])
    assert pde_table.ratios(rows) == ["2.50x (a)"] * 6


def test_want_of_memory_beside_others_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a peer that has one of its phases the other one alone is measured by the next run."""
    wanting: list[str] = []

    def timed(call: Any, *_: Any) -> dict[str, Any]:
        name = call.__name__
        asked.append(name)
        if name in wanting:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"median_ms": "1.0", "s_per_100": "0.1", "status": "ok"}

    def bench(*lacking: str, resume: bool = True) -> list[tuple[str, str]]:
        asked.clear()
        wanting[:] = lacking
        words = ("--points", 24, "--peers", pde_peers.NO_BIAS, "--output", tmp_path)
        run(monkeypatch, "bench", "sphere", *words, *SIZES, *(["--resume"] if resume else []))
        return [(r["phase"], r["status"]) for r in rows_of(tmp_path / "pde_solver_speed.csv")]

    asked: list[str] = []
    monkeypatch.setattr(pde_bench, "_timed", timed)
    monkeypatch.setattr(pde_bench, "draw", lambda _: None)
    monkeypatch.setenv(BESIDE, "/nowhere")
    assert bench("step", "infer", resume=False) == []
    assert bench("step") == [("inference", "ok")]
    assert bench() == [("inference", "ok"), ("training", "ok")] and asked == ["step"]
    assert len(bench()) == 2 and not asked
    monkeypatch.delenv(BESIDE)
    assert bench("infer", resume=False)[1] == ("inference", pde_bench.OUT_OF_MEMORY)
    # before a call, too
    monkeypatch.setenv(BESIDE, "/nowhere")
    monkeypatch.setattr(pde_bench, "model_of", lambda *_: timed(_lacking))
    assert bench("_lacking", resume=False) == []


def _lacking() -> None:
    pass


def test_the_matrix_of_distances_is_made_once_for_all_layers() -> None:
    from flashbias_convert.models.pde_transformer import Distances

    points = torch.rand(2, 30, 3) + 100  # far away: |x|^2 + |y|^2 - 2 x.y would be rounded off
    squares = pde_peers.Squares()
    where = Distances.of(points)
    found = squares.of(where)
    truth = torch.cdist(points.double(), points.double()).square()[:, None]
    assert torch.allclose(found.double(), truth, atol=1e-5) and squares.of(where) is found
    assert squares.of(Distances.of(points + 1)) is not found
    weight = torch.rand(2, 4, 30, requires_grad=True)
    bias = squares.bias(where, weight, torch.bfloat16)
    assert bias.shape == (2, 4, 30, 30) and bias.dtype == torch.bfloat16
    bias.float().sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(
        weight.grad.double(), -truth.sum(-1).expand(-1, 4, -1), rtol=1e-2, atol=1e-3
    )
