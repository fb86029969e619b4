"""A task for the PDE solver: fields on the surface of a mesh, from their values at a few points.

Fields are sums of plane waves of one wavenumber: exact solutions of the Helmholtz equation
Delta u + kappa^2 u = 0, so that the target is known at every point without a numerical solver. A
solver sees all points and the values at one in ten of them, and says what the field is everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def _sphere(count: int, generator: np.random.Generator) -> np.ndarray:
    points = generator.normal(size=(count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _torus(count: int, generator: np.random.Generator) -> np.ndarray:
    """Radii 1 and `TUBE`; where the tube's angle is small, the surface is wider."""
    tube = np.empty(0)
    while len(tube) < count:
        angle, kept = generator.random((2, 2 * count))
        angle = 2 * np.pi * angle
        tube = np.concatenate([tube, angle[kept < (1 + TUBE * np.cos(angle)) / (1 + TUBE)]])
    tube, ring = tube[:count], 2 * np.pi * generator.random(count)
    out = 1 + TUBE * np.cos(tube)
    return np.stack([out * np.cos(ring), out * np.sin(ring), TUBE * np.sin(tube)], axis=1)


TUBE = 0.4
#: surfaces without a file: what draws points on them by area, and the radius of the ball around
SURFACES = {"torus": (_torus, 1 + TUBE), "sphere": (_sphere, 1.0)}


def surface_points(surface: Path | str, count: int, seed: int) -> Tensor:
    """Points on a surface, fp32 (count, 3), centred and within the unit ball.

    Args:
        surface: a mesh, from whose triangles points are drawn by area; points, ``.npy`` (N, 3), of
            which some are drawn; or one of `SURFACES`. A ``.ply`` of text needs nothing else,
            other meshes trimesh.
        count: how many.
        seed: of the draw.
    """
    generator = np.random.default_rng(seed)
    if str(surface) in SURFACES:
        draw, radius = SURFACES[str(surface)]
        return torch.from_numpy((draw(count, generator) / radius).astype(np.float32))
    path = Path(surface)
    if path.suffix == ".npy":
        every = np.load(path).astype(np.float64)
        if len(every) < count:
            raise SystemExit(f"{path} holds {len(every)} points, {count} are needed")
        points = every[generator.permutation(len(every))[:count]]
        centre, radius = _frame(every)
    else:
        vertices, triangles = read_mesh(path)
        points = _drawn(vertices, triangles, count, generator)
        centre, radius = _frame(vertices)
    return torch.from_numpy(((points - centre) / radius).astype(np.float32))


def _frame(points: np.ndarray) -> tuple[np.ndarray, float]:
    centre = (points.min(0) + points.max(0)) / 2
    return centre, float(np.linalg.norm(points - centre, axis=1).max())


def _drawn(
    vertices: np.ndarray, triangles: np.ndarray, count: int, generator: np.random.Generator
) -> np.ndarray:
    a, b, c = (vertices[triangles[:, i]] for i in range(3))
    area = np.linalg.norm(np.cross(b - a, c - a), axis=1)
    at = generator.choice(len(triangles), count, p=area / area.sum())
    u, v = generator.random((2, count, 1))
    inside = u + v <= 1
    u, v = np.where(inside, u, 1 - u), np.where(inside, v, 1 - v)
    return a[at] + u * (b - a)[at] + v * (c - a)[at]


def read_mesh(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Vertices (V, 3) in fp64 and triangles (F, 3)."""
    if path.suffix == ".ply" and path.read_bytes()[:64].split(b"\n")[1].startswith(b"format ascii"):
        return _read_text_ply(path)
    try:
        import trimesh  # type: ignore[import-not-found]
    except ImportError as problem:
        raise SystemExit(
            f"{path} needs trimesh: pip install 'flashbias-convert[mesh]'; the surfaces "
            f"{', '.join(SURFACES)} need no file"
        ) from problem
    mesh = trimesh.load(path, force="mesh")
    return np.asarray(mesh.vertices, np.float64), np.asarray(mesh.faces)


def _read_text_ply(path: Path) -> tuple[np.ndarray, np.ndarray]:
    lines = path.read_text().splitlines()
    start = lines.index("end_header") + 1
    header = [line.split() for line in lines[:start]]
    sizes = {words[1]: int(words[2]) for words in header if words[:1] == ["element"]}
    rows = [line.split() for line in lines[start : start + sizes["vertex"] + sizes["face"]]]
    vertices = np.array([row[:3] for row in rows[: sizes["vertex"]]], np.float64)
    faces = [[int(i) for i in row[1 : 1 + int(row[0])]] for row in rows[sizes["vertex"] :]]
    return vertices, np.array([(f[0], f[i], f[i + 1]) for f in faces for i in range(1, len(f) - 1)])


@dataclass(frozen=True)
class Task:
    """What the fields are.

    Attributes:
        wavenumber: kappa; the wavelength is 2 pi / kappa, of bodies with radius 1.
        waves: how many plane waves make a field.
        known: share of the points whose values are given.
    """

    wavenumber: float = 12.0
    waves: int = 24
    known: float = 0.1

    def fields(
        self, points: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Inputs (count, N, 2), known values and where they are, and fields (count, N, 1).

        Args:
            points: shape (N, 3).
            count: how many fields; each has other waves and other known points.
            generator: on the device of the points.
        """
        draw = {"generator": generator, "device": points.device}
        direction = torch.randn(count, 3, self.waves, **draw)
        direction = direction / direction.norm(dim=1, keepdim=True)
        phase = 2 * math.pi * torch.rand(count, 1, self.waves, **draw)
        size = torch.randn(count, 1, self.waves, **draw) * (2 / self.waves) ** 0.5
        angle = self.wavenumber * (points @ direction) + phase
        field = (size * angle.cos()).sum(-1, keepdim=True)
        known = (torch.rand(count, len(points), 1, **draw) < self.known).float()
        return torch.cat([field * known, known], -1), field


class Source:
    """Points and fields without end, the same for the same seed.

    Args:
        pool: shape (P, 3); each batch has its own choice of them.
        points: how many, N.
        task: what the fields are.
        seed: of both.
    """

    def __init__(self, pool: Tensor, points: int, task: Task, seed: int) -> None:
        self.pool, self.points, self.task = pool, points, task
        self.generator = torch.Generator(pool.device).manual_seed(seed)

    def next(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Points (batch, N, 3), inputs (batch, N, 2) and fields (batch, N, 1)."""
        order = torch.randperm(len(self.pool), generator=self.generator, device=self.pool.device)
        chosen = self.pool[order[: self.points]]
        inputs, field = self.task.fields(chosen, batch, self.generator)
        return chosen.expand(batch, -1, -1), inputs, field
