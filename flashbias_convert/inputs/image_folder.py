"""A folder of images, prepared as the model wants them, with classes where the folder has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .batch import Batch, Inputs
from .random_inputs import image_shape

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
_PROCESSOR = "preprocessor_config.json"
Prepare = Callable[[Any], Tensor]


def image_inputs(
    model: nn.Module,
    folder: Path,
    samples: int,
    batch: int,
    seed: int = 0,
    processor: Path | None = None,
) -> Inputs:
    """Random images of a folder, without repetition.

    One folder per class (``folder/class/image.png``) gives labels: by name, where the model knows
    the names of its classes, else in alphabetical order, if there are as many as the model has.

    Args:
        model: of timm or transformers; says how large images must be, and how they are normalised.
        folder: images, in it or in folders in it.
        samples: how many at most.
        batch: how many at once.
        seed: which.
        processor: a folder that may hold a ``preprocessor_config.json`` of transformers.

    Raises:
        UsageError: no images, an unreadable one, or a model that takes none.
    """
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not found:
        raise UsageError(f"{folder} holds no images", f"known suffixes: {' '.join(SUFFIXES)}")
    chosen = random.Random(seed).sample(found, min(samples, len(found)))
    prepare, notes = _prepare(model, processor)
    classes, about = _classes(model, folder, found)
    as_keyword = getattr(model, "main_input_name", None) == "pixel_values"

    def batches() -> Iterator[Batch]:
        for start in range(0, len(chosen), batch):
            some = chosen[start : start + batch]
            images = torch.stack([prepare(_open(path)) for path in some])
            labels = torch.tensor([classes[_owner(p, folder)] for p in some]) if classes else None
            args = () if as_keyword else (images,)
            kwargs = {"pixel_values": images} if as_keyword else {}
            yield Batch(args, kwargs, len(some), labels)

    source = f"{len(chosen)} of {len(found)} images in {folder} (seed {seed})"
    return Inputs(batches(), source, (*notes, *about), "classes" if classes else None)


def _open(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as an image: {error}") from error


# -- classes ---------------------------------------------------------------------------------


def _owner(path: Path, folder: Path) -> str:
    """The name of the class folder; "" for an image that lies in no folder of its own."""
    parts = path.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else ""


def _classes(
    model: nn.Module, folder: Path, found: list[Path]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Class folder -> label, empty without labels, and why."""
    names = sorted({_owner(path, folder) for path in found})
    if "" in names:
        return {}, ()
    known = _class_names(model)
    if known and all(name in known for name in names):
        return {name: known[name] for name in names}, ()
    count = _class_count(model)
    if count == len(names):
        about = f"the {count} folders are taken for the model's classes in alphabetical order"
        return {name: label for label, name in enumerate(names)}, (about,)
    return {}, (
        f"no labels: {len(names)} folders, but the model has {count or 'an unknown number of'} "
        "classes and does not know them by these names",
    )


def _class_names(model: nn.Module) -> dict[str, int]:
    cfg: Any = getattr(model, "pretrained_cfg", None)
    names = (cfg or {}).get("label_names") or ()
    if not names:
        config: Any = getattr(model, "config", None)
        return {str(name): int(i) for name, i in (getattr(config, "label2id", None) or {}).items()}
    return {str(name): label for label, name in enumerate(names)}


def _class_count(model: nn.Module) -> int | None:
    for owner in (model, getattr(model, "config", None)):
        for name in ("num_classes", "num_labels"):
            count = getattr(owner, name, None)
            if isinstance(count, int):
                return count
    return None


# -- preparation -----------------------------------------------------------------------------


def _prepare(model: nn.Module, processor: Path | None) -> tuple[Prepare, tuple[str, ...]]:
    """A function from an image to (channels, height, width), and notes."""
    shape = image_shape(model)
    if shape is None:
        raise UsageError(f"{type(model).__name__} does not say that it takes images")
    if getattr(model, "pretrained_cfg", None) is not None:
        return _of_timm(model, shape), ()
    if processor is not None and (processor / _PROCESSOR).is_file():
        return _of_transformers(processor), ()
    note = f"no {_PROCESSOR} found: images are resized and scaled to the range from -1 to 1"
    return _plain(shape), (note,)


def _of_timm(model: nn.Module, shape: tuple[int, int, int]) -> Prepare:
    from timm.data import create_transform, resolve_data_config

    config = {**resolve_data_config({}, model=model), "input_size": shape}
    prepare: Prepare = create_transform(**config, is_training=False)
    return prepare


def _of_transformers(folder: Path) -> Prepare:
    from transformers import AutoImageProcessor

    from ..checkpoint.offline import hub_offline

    try:
        with hub_offline():
            processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # raises anything for a bad file
        raise UsageError(f"{folder / _PROCESSOR} cannot be used: {error}") from error

    def prepare(image: Any) -> Tensor:
        pixels: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels

    return prepare


def _plain(shape: tuple[int, int, int]) -> Prepare:
    from torchvision.transforms import v2

    steps: list[Any] = [v2.ToImage(), v2.Resize(shape[1:], antialias=True)]
    if shape[0] == 1:
        steps.append(v2.Grayscale())
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * shape[0], [0.5])]
    prepare: Prepare = v2.Compose(steps)
    return prepare
