"""Random inputs of the sizes that a model says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .batch import Batch, Inputs

#: tokens of a sequence where nobody says how many
DEFAULT_TOKENS = 128
#: a second of sound
_WAVE = 16_000
_HINT = (
    "pass real inputs: a folder of images, a text, an .npz, or package.module:function; or give "
    "the model a method random_inputs(count, generator)"
)


def random_inputs(
    model: nn.Module, samples: int, batch: int, seed: int = 0, tokens: int | None = None
) -> Inputs:
    """Normally distributed images or waves, or uniformly distributed tokens.

    Args:
        model: of timm, of transformers, any model with a `config` that has a `vocab_size`, or one
            that has a method `random_inputs(count, generator)`, which gives the positional
            arguments of a call for so many samples.
        samples: how many, in all.
        batch: how many at once.
        seed: of the generator.
        tokens: length of a sequence; default 128, or less where the model ends before.

    Raises:
        UsageError: the model does not say what it takes.
    """
    draw = _drawer(model, tokens)
    generator = torch.Generator().manual_seed(seed)

    def batches() -> Iterator[Batch]:
        for start in range(0, samples, batch):
            yield draw(min(batch, samples - start), generator)

    return Inputs(batches(), f"random inputs (seed {seed})")


def _drawer(model: nn.Module, tokens: int | None) -> Any:
    """A function (count, generator) -> Batch."""
    own = getattr(model, "random_inputs", None)
    if callable(own):
        return lambda n, g: Batch(tuple(own(n, g)), size=n)
    config: Any = getattr(model, "config", None)
    kind = getattr(model, "main_input_name", None)
    vocabulary = vocabulary_size(model)
    if kind == "input_values":
        return lambda n, g: _named(kind, torch.randn(n, _WAVE, generator=g))
    shape = image_shape(model)
    if shape is not None and (kind == "pixel_values" or vocabulary is None):
        as_keyword = kind == "pixel_values"
        return lambda n, g: _image_batch(torch.randn(n, *shape, generator=g), as_keyword)
    if vocabulary is not None and kind in (None, "input_ids"):
        length = sequence_length(model, tokens)
        twice = bool(getattr(config, "is_encoder_decoder", False))

        def draw(n: int, g: torch.Generator) -> Batch:
            ids = _tokens(n, length, vocabulary, config, g)
            if kind is None:
                return Batch(args=(ids,), size=n)
            if not twice:
                return _named("input_ids", ids)
            answer = _tokens(n, length, vocabulary, config, g)
            return Batch(kwargs={"input_ids": ids, "decoder_input_ids": answer}, size=n)

        return draw
    raise UsageError(f"{type(model).__name__} does not say what inputs it takes", _HINT)


def _named(name: str, tensor: Tensor) -> Batch:
    return Batch(kwargs={name: tensor}, size=len(tensor))


def _image_batch(images: Tensor, as_keyword: bool) -> Batch:
    return _named("pixel_values", images) if as_keyword else Batch((images,), size=len(images))


def _tokens(count: int, length: int, vocabulary: int, config: Any, g: torch.Generator) -> Tensor:
    """Shape (count, length), without the padding token: some models take it for a mask."""
    ids = torch.randint(0, vocabulary, (count, length), generator=g)
    padding = getattr(config, "pad_token_id", None)
    return ids if padding is None else ids.where(ids != padding, (ids + 1) % vocabulary)


# -- what a model says of itself -------------------------------------------------------------


def vocabulary_size(model: nn.Module) -> int | None:
    """Number of tokens that a model knows, or None."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


def sequence_length(model: nn.Module, tokens: int | None) -> int:
    """Length of a sequence: what was asked for, or as much as the model takes.

    Raises:
        UsageError: more tokens than the model takes.
    """
    config = getattr(model, "config", None)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "block_size")
    limits = [v for n in names if isinstance(v := getattr(config, n, None), int) and v > 0]
    # RoBERTa and its kin count positions from the padding index on
    limit = min(limits) - 2 if limits else None
    if tokens is None:
        return DEFAULT_TOKENS if limit is None else max(1, min(DEFAULT_TOKENS, limit))
    if limits and tokens > min(limits):
        raise UsageError(f"the model takes {min(limits)} tokens at most, got {tokens}")
    return tokens


def image_shape(model: nn.Module) -> tuple[int, int, int] | None:
    """(channels, height, width) of the images that a model takes, or None."""
    embed: Any = getattr(model, "patch_embed", None)
    cfg: Any = getattr(model, "pretrained_cfg", None)
    if cfg is not None and "input_size" in cfg:
        channels, *size = cfg["input_size"]
        projection = getattr(embed, "proj", None)
        channels = getattr(projection, "in_channels", channels)
        # the layer knows the size that the model was built for, the config that of its pretraining
        built = getattr(embed, "img_size", None)
        height, width = _pair(built) if built is not None else size
        return int(channels), int(height), int(width)
    config: Any = getattr(model, "config", None)
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", None)
    if side is None:
        return None
    return (int(getattr(vision, "num_channels", 3)), *_pair(side))


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)
