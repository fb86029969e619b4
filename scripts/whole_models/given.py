"""Random inputs of models: images, texts, pages, sounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import drawn

#: called with the batch, the device and the dtype; returns arguments and keyword arguments
Inputs = Callable[[int, torch.device, torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]]


def images(size: int) -> Inputs:
    """Square images (B, 3, size, size)."""

    def make(count: int, device: torch.device, dtype: torch.dtype) -> Any:
        return (drawn((3, size, size), count).to(device, dtype),), {}

    return make


def tokens(n: int, vocabulary: int, masked: bool = False, **more: Any) -> Inputs:
    """Token numbers (B, n) without padding, and further keyword arguments.

    Args:
        n: tokens of a text.
        vocabulary: size of it.
        masked: with a mask of ones: some models make none while they are compiled, and then
            compute something else, or nothing.
        **more: handed on.
    """

    def make(count: int, device: torch.device, _: torch.dtype) -> Any:
        ids = _integers(count, n, high=vocabulary, device=device)
        return (ids,), {**more, "attention_mask": torch.ones_like(ids)} if masked else dict(more)

    return make


def pairs(n: int, vocabulary: int, masked: bool = False) -> Inputs:
    """For encoders with decoders.

    Args:
        n: tokens of either.
        vocabulary: size of it.
        masked: see `tokens`.
    """

    def make(count: int, device: torch.device, _: torch.dtype) -> Any:
        ids = _integers(count, n, high=vocabulary, device=device)
        call = {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
        return (), {**call, "attention_mask": torch.ones_like(ids)} if masked else call

    return make


def pages(n: int, vocabulary: int) -> Inputs:
    """Tokens with boxes (x0, y0, x1, y1)."""

    def make(count: int, device: torch.device, _: torch.dtype) -> Any:
        corners = _integers(count, n, 4, high=500, device=device, seed=2)
        boxes = torch.cat((corners[..., :2], corners[..., :2] + corners[..., 2:]), -1)
        return (_integers(count, n, high=vocabulary, device=device),), {"bbox": boxes}

    return make


def page_pairs(n: int, vocabulary: int) -> Inputs:
    """For an encoder that wants boxes, from 0 to 1, with a decoder; with a mask of ones."""

    def make(count: int, device: torch.device, dtype: torch.dtype) -> Any:
        (ids,), more = pages(n, vocabulary)(count, device, dtype)
        boxes = (more["bbox"] / 1000).to(dtype)
        mask = torch.ones_like(ids)
        call = {"input_ids": ids, "decoder_input_ids": ids, "bbox": boxes, "use_cache": False}
        return (), {**call, "attention_mask": mask}

    return make


def normal(*shapes: tuple[int, ...], **named: tuple[int, ...] | None) -> Inputs:
    """Normal numbers (B, *shape) as arguments, in order and by name; None stays None."""

    def make(count: int, device: torch.device, dtype: torch.dtype) -> Any:
        def numbers(shape: tuple[int, ...] | None) -> Tensor | None:
            return None if shape is None else drawn(shape, count).to(device, dtype)

        return tuple(map(numbers, shapes)), {k: numbers(shape) for k, shape in named.items()}

    return make


def sound(samples: int) -> Inputs:
    """Waves (B, samples)."""

    def make(count: int, device: torch.device, dtype: torch.dtype) -> Any:
        return (drawn((samples,), count).to(device, dtype),), {}

    return make


def _integers(count: int, *shape: int, high: int, device: torch.device, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, high, shape, generator=draw) for _ in range(count)]
    return torch.stack(rows).to(device)
