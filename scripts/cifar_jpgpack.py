"""Reading CIFAR-10 from a JPEG pack, and turning its images into model input.

A pack is one ``.npz`` file for each split, ``cifar10_{train,test}_jpgpack.npz``, with three
arrays: ``blob`` (uint8, all JPEG files one after the other), ``off`` (int64, n + 1 offsets into
``blob``) and ``y`` (n labels, numbers into ``CLASS_NAMES``). The images are 32 x 32 RGB.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

CLASS_NAMES: tuple[str, ...] = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
IMAGE_SIZE = 32
INPUT_SIZE = 64
MEAN: tuple[float, float, float] = (0.4914, 0.4822, 0.4465)
STD: tuple[float, float, float] = (0.2470, 0.2435, 0.2616)


def load_split(folder: str | Path, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Decode one split: images uint8 (n, 3, 32, 32) and labels int64 (n,), both on the CPU."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    with np.load(Path(folder) / f"cifar10_{split}_jpgpack.npz") as pack:
        blob, offsets, labels = pack["blob"].tobytes(), pack["off"].tolist(), pack["y"]
    images = np.empty((len(labels), IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for i in range(len(labels)):
        with Image.open(io.BytesIO(blob[offsets[i] : offsets[i + 1]])) as image:
            images[i] = np.asarray(image.convert("RGB"))
    channels_first = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return channels_first, torch.from_numpy(labels.astype(np.int64))


def to_model_input(images: Tensor) -> Tensor:
    """Images (n, 3, 32, 32) with values 0..255 -> float32 model input (n, 3, 64, 64).

    The work is done on the images' own device, so that a data set can stay there as uint8. Float
    images are taken as well (same range): augmentation mixes images, and a mixture is no longer
    an integer.
    """
    mean = torch.tensor(MEAN, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=images.device).view(1, 3, 1, 1)
    larger = F.interpolate(
        images.float(), size=(INPUT_SIZE, INPUT_SIZE), mode="bilinear", align_corners=False
    )
    return (larger / 255 - mean) / std
