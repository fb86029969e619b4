"""Damage around the weights: configs, indexes, shards, links."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from . import damage_bytes, damage_json, damage_safetensors
from .tiny import Good

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
_TEXTS = (
    b"", b"{", b"[" * 100_000, b"NaN", b"null", b"[1]", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}",
    b'{"architecture": "a", "architecture": 3}', b'{"a": ' + b"9" * 5000 + b"}", b"\x00" * 100,
    b'{"architectures": ["../../x"], "model_type": "bert"}', b'{"model_type": "\\ud800"}',
    b'{"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 10}',
    b'{"library": "flashbias", "architecture": "os", "args": {}}',
)  # fmt: skip
_NUMBERS = (0, -1, 1, 3, 17, 10**4, 10**5, 10**7, 10**9, 10**12, 2**63, 10**30, 1.5, 1e300)


def _copied(source: Path, folder: Path) -> Path:
    target = folder / "model"
    shutil.copytree(source, target)
    return target


def config_values(rng: Random, good: Good, folder: Path) -> Path:
    target = _copied(rng.choice([good.folder, good.shards]), folder)
    path = target / "config.json"
    path.write_text(json.dumps(damage_json.damaged(rng, json.loads(path.read_text()))))
    return target


def config_numbers(rng: Random, good: Good, folder: Path) -> Path:
    """Sizes of the model that its weights do not have."""
    target = _copied(good.folder, folder)
    path = target / "config.json"
    config = json.loads(path.read_text())
    args: dict[str, Any] = config["model_args"]
    name = rng.choice([*args, "in_chans", "mlp_ratio", "num_classes", "pretrained_window_sizes"])
    value: Any = rng.choice(_NUMBERS)
    if isinstance(args.get(name), list):
        value = rng.choice([[value] * len(args[name]), [value], [1, value], [1] * 10_000])
    (config if name == "num_classes" else args)[name] = value
    path.write_text(json.dumps(config))
    return target


def config_text(rng: Random, good: Good, folder: Path) -> Path:
    target = _copied(good.folder, folder)
    (target / "config.json").write_bytes(rng.choice(_TEXTS))
    return target


def config_elsewhere(rng: Random, good: Good, folder: Path) -> Path:
    """A config that is a link, a folder or a pipe."""
    target = _copied(good.folder, folder)
    path = target / "config.json"
    path.unlink()
    _odd_thing(rng, path, folder)
    return target


def _odd_thing(rng: Random, path: Path, folder: Path) -> None:
    what = rng.choice(["folder", "pipe", "out", "dangling", "loop", "zero", "self"])
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "out":
        (folder / "outside").write_text(json.dumps({"secret": 1}))
        path.symlink_to(folder / "outside")
    elif what == "loop":
        path.symlink_to(path.name)
    else:
        path.symlink_to({"dangling": "nowhere", "zero": "/dev/zero", "self": "."}[what])


def index_values(rng: Random, good: Good, folder: Path) -> Path:
    target = _copied(good.shards, folder)
    index = json.loads((target / INDEX).read_text())
    (target / INDEX).write_text(json.dumps(damage_json.damaged(rng, index)))
    return rng.choice([target, target / INDEX])


def index_names(rng: Random, good: Good, folder: Path) -> Path:
    """Keys of the index that lead to other files."""
    target = _copied(good.shards, folder)
    shutil.copy(good.bare, folder / "outside.safetensors")
    (target / "sub").mkdir()
    shutil.copy(good.bare, target / "sub" / "x.safetensors")
    index = json.loads((target / INDEX).read_text())
    wrong = rng.choice(
        [
            "../outside.safetensors", str(folder / "outside.safetensors"), "sub/x.safetensors",
            "config.json", INDEX, "sub", ".", "", "nothing", "\0", "a" * 300,
            "model-00002-of-00002.safetensors",
        ]
    )  # fmt: skip
    names = rng.sample(sorted(index["weight_map"]), rng.choice([1, 5, len(index["weight_map"])]))
    index["weight_map"].update(dict.fromkeys(names, wrong))
    (target / INDEX).write_text(json.dumps(index))
    return target


def shard_damaged(rng: Random, good: Good, folder: Path) -> Path:
    target = _copied(good.shards, folder)
    path = target / SHARD
    data = path.read_bytes()
    if rng.random() < 0.5:
        how = rng.choice(list(damage_bytes.DAMAGES.values()))
        path.write_bytes(how(rng, bytearray(data)))
    else:
        structured = rng.choice(list(damage_safetensors.DAMAGES.values()))
        path.write_bytes(structured(rng, *damage_safetensors.split(data)))
    return target


def weights_elsewhere(rng: Random, good: Good, folder: Path) -> Path:
    """Weights that are a link, a folder or a pipe."""
    source, name = rng.choice([(good.folder, "model.safetensors"), (good.shards, SHARD)])
    target = _copied(source, folder)
    content = (target / name).read_bytes()
    (target / name).unlink()
    if rng.random() < 0.3:
        (folder / "outside.safetensors").write_bytes(content)
        (target / name).symlink_to(Path("..") / "outside.safetensors")
    else:
        _odd_thing(rng, target / name, folder)
    return rng.choice([target, target / name])


def more_files(rng: Random, good: Good, folder: Path) -> Path:
    """A folder with further files, of which some look like weights."""
    target = _copied(good.folder, folder)
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(
            ["pytorch_model.bin", "x.pth", ".hidden.safetensors", "a.h5", INDEX, "\n.txt", "é.pt",
             ".model.safetensors.0a0a0a0a.tmp", ".model.safetensors.0a0a0a0a.old", "x.plan.json"]
        )  # fmt: skip
        (target / name).write_bytes(rng.choice([b"", b"junk", good.bare.read_bytes()]))
    if rng.random() < 0.5:
        (target / "model.safetensors").unlink()
    return target


DAMAGES: dict[str, Callable[[Random, Good, Path], Path]] = {
    f.__name__: f
    for f in (
        config_values, config_numbers, config_text, config_elsewhere, index_values, index_names,
        shard_damaged, weights_elsewhere, more_files,
    )
}  # fmt: skip
