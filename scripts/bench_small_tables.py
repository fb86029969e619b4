"""Does a fused kernel gain anything in small networks with a table of distances? On this card.

python scripts/bench_small_tables.py [--images 256] [--output FILE.csv]

Attention alone at the shapes of timm's EfficientViT (MSRA), whose heads wait for each other and so
are called one by one, and of EfficientFormer V2 where it downsamples, for images of 224 pixels:
the original's formula compiled, and this package's kernel with the table as a dense bias that the
batch shares. Milliseconds on the card alone (CUDA graph replays) in bf16. Writes a table and a
picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import row_file
import torch
from torch import Tensor

from flashbias_convert import Dense, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention

ROOT = Path(__file__).resolve().parents[1]
#: by name: windows of an image, heads of a call, queries, keys, size of queries, of values
SHAPES = {
    "EfficientViT M0, 1st stage": (4, 1, 49, 49, 16, 16),
    "EfficientViT M0, 2nd stage": (1, 1, 49, 49, 16, 32),
    "EfficientViT M0, 3rd stage": (1, 1, 16, 16, 16, 48),
    "EfficientViT M5, 1st stage": (4, 1, 49, 49, 16, 64),
    "EfficientViT M5, 2nd stage": (1, 1, 49, 49, 16, 96),
    "EfficientFormer V2, downsampling": (1, 8, 49, 196, 16, 64),
}
FIELDS = ("shape", "images", "way", "ms", "ratio", "card", "torch", "triton")


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As the originals compute it."""
    return ((q @ k.mT) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def ways(name: str, images: int, device: str) -> dict[str, Callable[[], Tensor]]:
    """Both ways to compute a call of a shape."""
    windows, heads, n, m, size, wide = SHAPES[name]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(windows * images, heads, *rest, device=device, dtype=torch.bfloat16)
        for rest in ((n, size), (m, size), (m, wide))
    )
    bias = torch.randn(heads, n, m, device=device, dtype=torch.bfloat16)
    prepared = PreparedBias(ScoreBias((Dense(bias=bias),), heads))
    compiled = torch.compile(formula, dynamic=False)
    return {
        "original, compiled": lambda: compiled(q, k, v, bias),
        "flashbias": lambda: flashbias_attention(q, k, v, prepared),
    }


def main() -> None:
    """Measure all shapes; write a row for each way, and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=256)
    results = ROOT / "scripts/results/bench_small_tables.csv"
    parser.add_argument("--output", type=Path, default=results)
    options = parser.parse_args()
    rows = [row for name in SHAPES for row in measured(name, options.images)]
    row_file.write(options.output, FIELDS, rows)
    draw(rows, options.output.with_suffix(".png"))


@torch.inference_mode()
def measured(name: str, images: int) -> list[dict[str, str]]:
    """The rows of a shape; `ratio` is the original's time over that of a row."""
    import triton

    times = {}
    for way, call in ways(name, images, "cuda").items():
        call()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = triton.testing.do_bench_cudagraph(call, rep=40, return_mode="median")
        times[way] = float(found)
    first = next(iter(times.values()))
    where = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows = [
        {"shape": name, "images": str(images), "way": way, "ms": f"{ms:.4f}",
         "ratio": f"{first / ms:.2f}", **where, "triton": triton.__version__}
        for way, ms in times.items()
    ]  # fmt: skip
    for row in rows:
        print(*row.values(), flush=True)
    return rows


def draw(rows: list[dict[str, str]], picture: Path) -> None:
    """Bars of milliseconds, the ways of a shape beside each other."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["way"] for row in rows))
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for at, name in enumerate(names):
        own = [row for row in rows if row["way"] == name]
        places = [i + 0.4 * (at - 0.5) for i in range(len(own))]
        bars = axes.barh(places, [float(row["ms"]) for row in own], 0.38, label=name)
        axes.bar_label(bars, [row["ms"] for row in own], padding=3, fontsize=7)
    axes.set_yticks(range(len(SHAPES)), list(SHAPES), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"ms of a call, {rows[0]['images']} images, {rows[0]['card']}, bf16")
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
