"""The PDE solver of the FlashBias paper: is it better with distances, and what do they cost?

python scripts/paper/pde_solver.py train [MESH] [--points 8192] [--steps 3000] [--minutes M]
python scripts/paper/pde_solver.py bench [MESH] [--points 8192 16384 32186] [--kernel FILE.py]

MESH is a mesh (``.ply`` of text, or what trimesh reads: `pip install flashbias-convert[mesh]`),
points, ``.npy`` (N, 3), or the name of a surface that needs no file: torus (the default), sphere.

``train`` trains the paper's solver (8 layers, 128 channels, 8 heads) twice, with weighted distances
in its attention and without, as many steps each, on fields that are known at one in ten points
(`pde_task.py`), and measures both on points and fields that neither has seen: pde_solver.csv,
pde_solver.md and pde_solver.png. `--minutes` ends both after that time.

``bench`` times a whole training step (Adam, batch 1, bf16 autocast) and inference, with its memory,
weights and optimizer included, beside other ways to compute the same attention, each in a process:
pde_solver_speed.csv, and the paper's table of them with its numbers beside as
pde_solver_speed_table.csv, pde_solver_speed.md and pde_solver_speed.png. A peer that runs out of
memory, or dies, says so. A kernel of a file is a peer, too, such as the one that the authors of the
paper publish (`given_kernel.py`). `error_out`, `error_dq` and `error_dw` are relative errors of one
attention call and its gradients at no more than 2,048 points against float64; `correct` says
whether none is more than twice that of the formula in the same dtype, or than what fp32 leaves of a
bias of this size.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from pde_bench import timed
from pde_peers import PEERS
from pde_task import SURFACES, Task
from pde_training import trained

ROOT = Path(__file__).resolve().parents[2]
#: points that training and tests draw from, as a multiple of those of a field
POOL = 4


def arguments() -> argparse.Namespace:
    """The words of a command."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "bench"))
    parser.add_argument("mesh", nargs="?", default="torus", help=f"a file, or of {list(SURFACES)}")
    parser.add_argument("--points", type=int, nargs="+", help="(train: 8192)")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--kernel", type=Path, help="a Python file, see given_kernel.py")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=15.0, help="no more calls of a row after")
    parser.add_argument("--stop-s", type=float, default=math.inf, help="(bench) begin no row after")
    parser.add_argument("--resume", action="store_true", help="(bench) keep rows of the output")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="(train) for both models")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--check-every", type=int, default=250)
    parser.add_argument("--fields", type=int, default=32, help="unseen fields of the table")
    parser.add_argument("--pool", type=int, default=POOL, help="points to draw from, per point")
    parser.add_argument("--wavenumber", type=float, default=Task.wavenumber)
    parser.add_argument("--known", type=float, default=Task.known)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        default="bfloat16" if cuda else "float32")  # fmt: skip
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results")
    args = parser.parse_args()
    args.points = args.points or ([8192] if args.what == "train" else [8192, 16384, 32186])
    return args


def main() -> None:
    """Train, or measure."""
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    (trained if args.what == "train" else timed)(args)


if __name__ == "__main__":
    main()
