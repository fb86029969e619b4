"""How much memory is kept by holes between what stays, while sites are planned.

python -m tests.checkpoint.streaming.holes FOLDER prints it as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.checkpoint.allocator import give_back
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.recipe import Description, Site
from tests import toy

from ..sharded import allocated, write_shards

SITES = 3
_COUNT, _LARGE, _SMALL = 16, 2**21, 2**16
#: bytes that are freed between others that are not
FREED = _COUNT * _LARGE


def kept() -> int:
    """Bytes of FREED that stay in use."""
    torch.ones(2**22)  # freed at once: from then on glibc keeps blocks of 16 MiB, if it may
    give_back()
    before, large, small = allocated(), [], []
    for _ in range(_COUNT):
        large.append(torch.ones(_LARGE // 4))
        small.append(torch.ones(_SMALL // 4))
    del large
    return allocated() - before - _COUNT * _SMALL


def main() -> None:
    """Convert, and plan once more."""
    folder, inside = Path(sys.argv[1]), []

    def describe(site: Site) -> Description:
        inside.append(kept())
        return toy.describe(site)

    def model() -> toy.ToyModel:
        return toy.ToyModel(SITES)

    source = write_shards(folder / "m", model().state_dict(), "safetensors", 3)
    options: dict[str, Any] = {
        "arch": model,
        "recipes": [toy.make_recipe(describe=describe)],
        "options": DecomposeOptions(force_all=True),
    }
    convert_checkpoint(source, folder / "out", **options)
    convert_checkpoint(source, dry_run=True, **options)
    print(json.dumps(inside))


if __name__ == "__main__":
    main()
