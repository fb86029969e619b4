"""Small checkpoints in shards, and how much memory is in use.

python -m tests.checkpoint.sharded SOURCE OUTPUT N converts, and kills itself after N bytes.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Layout = str


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], layout: Layout, shards: int = 3
) -> Path:
    """Tensors in shards of about one size, in order, with an index; layout "bin" or other."""
    folder.mkdir(exist_ok=True)
    kind = "bin" if layout == "bin" else "safetensors"
    stem = "pytorch_model" if kind == "bin" else "model"
    names = [f"{stem}-{i + 1:05d}-of-{shards:05d}.{kind}" for i in range(shards)]
    total, before, where = sum(t.nbytes for t in tensors.values()), 0, {}
    for key, tensor in tensors.items():
        where[key] = names[min(shards * before // total, shards - 1)]
        before += tensor.nbytes
    for name in names:
        own = {k: t.contiguous() for k, t in tensors.items() if where[k] == name}
        if kind == "bin":
            torch.save(own, folder / name)
        else:
            save_file(own, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_bloom(
    folder: Path, layout: Layout, shards: int, *, empty: bool = False, **sizes: Any
) -> Path:
    """A BLOOM in bfloat16 with random weights (`empty`: zeros), in the layout of transformers."""
    import transformers

    config = transformers.BloomConfig(**{"vocab_size": 64, "n_head": 4, "n_layer": 2, **sizes})
    with torch.random.fork_rng(devices=[]), torch.device("meta" if empty else "cpu"):
        torch.manual_seed(0)
        model = transformers.BloomForCausalLM(config).to(torch.bfloat16)
    tensors = {
        k: torch.zeros_like(t, device="cpu") if empty else t for k, t in model.state_dict().items()
    }
    del tensors["lm_head.weight"]  # tied
    folder.mkdir()
    config.architectures = ["BloomForCausalLM"]
    config.save_pretrained(folder)
    return write_shards(folder, tensors, layout, shards)


def high_water() -> int:
    """Most bytes that this process has had in memory since `forget_high_water`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def forget_high_water() -> int:
    """Count from now on; what is in memory now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def allocated() -> int:
    """Bytes that this process has allocated, and not mapped from files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main() -> None:
    """Convert, and be killed on the way."""
    from flashbias_convert.checkpoint import convert_checkpoint

    torch.set_num_threads(1)
    limit = int(sys.argv[3])

    def copying(done: int, total: int, name: str) -> None:
        if done > limit:
            os.kill(os.getpid(), signal.SIGKILL)

    convert_checkpoint(sys.argv[1], sys.argv[2], copying=copying)


if __name__ == "__main__":
    main()
