"""A text as bytes: the part to train on, the part held out, and windows of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

#: Share of a text, from its start, that models are trained on; the rest is held out.
TRAINED_ON = 0.9


def load_bytes(file: Path, part: str) -> Tensor:
    """A part of a text, int64 (n,), one number from 0 to 255 per byte.

    Args:
        file: any text file.
        part: "train", the first nine tenths, or "held out", the rest.
    """
    content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
    cut = int(TRAINED_ON * len(content))
    return {"train": content[:cut], "held out": content[cut:]}[part]


def windows(content: Tensor, length: int, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Cut a text into windows that do not overlap, without its ragged rest.

    Args:
        content: int64 (n,).
        length: of a window.
        total: how many bytes to predict, a multiple of `length`; default as many as fit.

    Returns:
        Inputs and, one byte further on, targets, both (windows, length). For one `total` the
        targets of all lengths are the same bytes.
    """
    total = (len(content) - 1) // length * length if total is None else total
    if not 0 < total < len(content) or total % length:
        raise ValueError(f"{len(content)} bytes have no {total} targets in windows of {length}")
    return content[:total].view(-1, length), content[1 : total + 1].view(-1, length)
