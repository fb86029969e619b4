"""Compare a converted SwinV2 with its original on crops of a photograph.

python scripts/demo.py ORIGINAL CONVERTED

The photograph is the one that matplotlib ships. Prints how often both models name the same class,
how far their logits are apart, and how to load the converted file.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from cifar_jpgpack import CLASS_NAMES, IMAGE_SIZE, to_model_input
from PIL import Image
from torch import Tensor, nn

from flashbias_convert import load_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.checkpoint import open_model


def photograph_crops(count: int, seed: int = 0) -> Tensor:
    """Random square crops of a photograph, at many scales: uint8 (count, 3, 32, 32)."""
    from matplotlib import cbook

    with cbook.get_sample_data("grace_hopper.jpg") as file, Image.open(file) as opened:
        photograph = opened.convert("RGB")
    random = np.random.default_rng(seed)
    crops = []
    for _ in range(count):
        side = int(random.integers(IMAGE_SIZE, min(photograph.size)))
        left = int(random.integers(0, photograph.width - side + 1))
        top = int(random.integers(0, photograph.height - side + 1))
        box = (left, top, left + side, top + side)
        crop = photograph.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX, box)
        crops.append(torch.from_numpy(np.array(crop)).permute(2, 0, 1))
    return torch.stack(crops)


@torch.inference_mode()
def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Logits (n, classes) of model input (n, 3, 64, 64)."""
    return torch.cat([model(some) for some in images.split(32)])


def main() -> None:
    """Load both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("original", type=Path)
    parser.add_argument("converted", type=Path)
    parser.add_argument("--crops", type=int, default=256)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.simplefilter("ignore", BackendFallbackWarning)  # a demonstration may run on a CPU
    original = open_model(args.original).model.to(device).eval()
    converted = load_model(args.converted, device=device)
    images = to_model_input(photograph_crops(args.crops)).to(device)
    before, after = logits_of(original, images), logits_of(converted, images)
    same = before.argmax(1) == after.argmax(1)
    difference = (before - after).abs()
    print(f"\nThe same {args.crops} crops of a photograph through both models on {device}:")
    print(f"  same class            {int(same.sum())} of {args.crops}")
    print(f"  logit difference      mean {difference.mean():.4f}, largest {difference.max():.4f}")
    print(f"  logits of the original reach from {before.min():.2f} to {before.max():.2f}")
    names = [CLASS_NAMES[i] for i in before.argmax(1)[:4]]
    print(f"  (first crops look like: {', '.join(names)})")
    print("\nExact instead of truncated: add --method exact. Look before you convert:")
    print(f"  flashbias-convert inspect {args.original}")


if __name__ == "__main__":
    main()
