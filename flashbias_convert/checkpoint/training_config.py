"""The architecture in what training programs save beside their weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from .architecture import Architecture
from .inert import plain
from .read import Checkpoint
from .signature import with_num_classes

#: arguments that training programs and timm call alike
_SHARED = ("num_classes", "img_size", "in_chans")
#: under which the hyperparameters of a Lightning module name a model of timm
_NAMES = ("model_name", "model", "arch", "architecture", "backbone")
#: MODEL.TYPE of the programs of Swin's authors -> section of the config, a model of timm, and
#: names of options there and here
_SWIN = {
    "swinv2": (
        "SWINV2",
        "swinv2_tiny_window8_256",
        {"PRETRAINED_WINDOW_SIZES": "pretrained_window_sizes"},
    ),
    "swin": ("SWIN", "swin_tiny_patch4_window7_224", {}),
}
_SWIN_OPTIONS = {
    "PATCH_SIZE": "patch_size",
    "IN_CHANS": "in_chans",
    "EMBED_DIM": "embed_dim",
    "DEPTHS": "depths",
    "NUM_HEADS": "num_heads",
    "WINDOW_SIZE": "window_size",
    "MLP_RATIO": "mlp_ratio",
    "QKV_BIAS": "qkv_bias",
}


def from_training(checkpoint: Checkpoint) -> Architecture | None:
    """The architecture that a training program noted, or None.

    Understood are the arguments of timm's training script, hyperparameters of Lightning modules
    that name a model of timm, the config of the programs of Swin's authors, and ``arch`` in the
    metadata of a header.
    """
    origin = f"the training arguments in {checkpoint.path}"
    arch = _from_swin(checkpoint.extras.get("config"), origin) or _from_names(checkpoint, origin)
    return None if arch is None else with_num_classes(arch, checkpoint.tensors)


def _from_names(checkpoint: Checkpoint, origin: str) -> Architecture | None:
    options = _options(checkpoint.extras.get("args"))
    hyper = _options(checkpoint.extras.get("hyper_parameters"))
    metadata, extras = checkpoint.metadata, checkpoint.extras
    named = [options.get("model"), extras.get("arch"), *(hyper.get(key) for key in _NAMES)]
    named += [metadata.get("architecture"), metadata.get("arch")]
    name = next((n for n in named if isinstance(n, str) and _is_timm_model(n)), None)
    if name is None:
        return None
    given = {**hyper, **options}
    args = {key: given[key] for key in _SHARED if isinstance(given.get(key), int | list | tuple)}
    args |= _model_kwargs(options.get("model_kwargs"))
    return Architecture("timm", name, args, origin=origin)


def _options(value: Any) -> Mapping[str, Any]:
    value = plain(value)
    if isinstance(value, argparse.Namespace):
        return vars(value)
    return value if isinstance(value, Mapping) else {}


def _model_kwargs(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return dict(value) if isinstance(value, Mapping) else {}


def _is_timm_model(name: str) -> bool:
    import timm

    return bool(timm.is_model(name))


def _from_swin(config: Any, origin: str) -> Architecture | None:
    """From the config that github.com/microsoft/Swin-Transformer trains with."""
    model, data = _section(config, "MODEL"), _section(config, "DATA")
    kind = model.get("TYPE")
    if kind not in _SWIN:
        return None
    section, name, more = _SWIN[kind]
    options = _section(model, section)
    if options.get("APE") or options.get("PATCH_NORM") is False:
        return None  # variants that timm does not have
    names = {**_SWIN_OPTIONS, **more}
    args = {names[key]: value for key, value in options.items() if key in names}
    if isinstance(data.get("IMG_SIZE"), int):
        args["img_size"] = data["IMG_SIZE"]
    return Architecture("timm", name, args, origin=origin)


def _section(config: Any, name: str) -> Mapping[str, Any]:
    found = config.get(name) if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}
