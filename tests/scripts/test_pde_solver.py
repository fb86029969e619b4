"""The script of the PDE solver: its surfaces and fields, and runs of the smallest size."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "paper"
sys.path.insert(0, str(SCRIPTS))

import pde_peers  # noqa: E402
import pde_solver as script  # noqa: E402
import pde_task  # noqa: E402

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


def run(monkeypatch: pytest.MonkeyPatch, *words: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
    script.main()


SIZES = ("--layers", 1, "--backend", "sdpa", "--device", "cpu", "--dtype", "float32")


def test_a_run_of_training(tmp_path: Path, cube: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    short = ("--points", 32, "--steps", 3, "--check-every", 2, "--fields", 2)
    run(monkeypatch, "train", cube, *short, *SIZES, "--output", tmp_path)
    with (tmp_path / "pde_solver.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["with distances", "without"]
    assert all(0 < float(row["error"]) < 10 and row["points"] == "32" for row in rows)
    assert (tmp_path / "pde_solver.png").stat().st_size > 0


def test_a_run_of_the_clock(tmp_path: Path, cube: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(script.PEERS, pde_peers.FLEX, fails)
    short = ("--points", 24, 32, "--repeats", 3, "--peers")
    peers = (pde_peers.OURS, pde_peers.NO_BIAS, pde_peers.SDPA, pde_peers.FLEX)
    run(monkeypatch, "bench", cube, *short, *peers, *SIZES, "--output", tmp_path)
    with (tmp_path / "pde_solver_speed.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (3 * 2 + 1)
    for row in rows:
        if row["peer"] == pde_peers.FLEX:
            assert row["status"] == "out of memory" and not row["median_ms"]
            continue
        assert row["status"] == "ok" and float(row["median_ms"]) > 0
        no_bias = row["peer"] == pde_peers.NO_BIAS
        assert row["correct"] == ("no bias" if no_bias else "True")
