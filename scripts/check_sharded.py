"""Convert a large sharded checkpoint: memory, time, and what is left when it is killed.

    python scripts/check_sharded.py 20 --shard 2        # gigabytes; needs twice that, and a shard
    python scripts/check_sharded.py 2 --shard 0.5 --layout bin
    python scripts/check_sharded.py 0.36 --shard 0.09 --model swin --method auto
    python scripts/check_sharded.py 0.8 --shard 0.1 --model swin-transformers --method auto

Makes a BLOOM of that size (or a SwinV2 with windows of 24 x 24, whose biases have to be made and
decomposed, or a Swin as transformers saves it, under other names than it loads it) with random
weights in FOLDER, copies it (what the disk can do), converts
it in a process whose memory is measured, converts it again and kills that half-way, and goes on.
Both outputs must have the same bytes, every tensor those of the input, and every shard the names of
the input: only those of terms are new, in a file of their own. Writes
scripts/results/check_sharded.csv, a row for each step; memory is resident memory, mapped files
included, beyond what the process has after its imports. Its parts are looked at ten times a second,
each at its highest: what the process allocated itself, and pages of the page cache that it has
mapped, of the checkpoints and of libraries. The kernel maps such pages in blocks that it chooses,
and takes them back when memory is short.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashbias_convert.checkpoint.streaming import TERMS_NAME

RESULTS = Path(__file__).parent / "results" / "check_sharded.csv"
HIDDEN, VOCABULARY = 4096, 1024
PARTS = ("allocated", "mapped of checkpoints", "mapped of libraries")
#: of the largest shard
MOST_MEMORY = 1.2


def main() -> int:
    """Run all steps; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("--shard", type=float, default=2.0, help="gigabytes of a shard")
    parser.add_argument("--layout", choices=("safetensors", "bin"), default="safetensors")
    parser.add_argument("--model", choices=tuple(MAKERS), default="bloom")
    parser.add_argument("--method", choices=("auto", "exact", "svd"), default="auto")
    parser.add_argument("--folder", type=Path, default=None, help="where there is space")
    parser.add_argument("--worker", nargs=3, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return work(Path(args.worker[0]), Path(args.worker[1]), int(args.worker[2]), args)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="check_sharded_") as folder:
        needed, free = 2 * args.gigabytes + args.shard, shutil.disk_usage(folder).free / 1e9
        if free < needed:
            print(f"{needed:.0f} GB are needed in {folder}, {free:.0f} GB are free")
            return 2
        return Check(args, Path(folder)).run()


class Check:
    """The steps, and a row for each."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._source, self._output = args, folder / "model", folder / "out"
        self._rows: list[dict[str, Any]] = []
        self._largest = self._total = self._shards = 0

    def run(self) -> int:
        self._timed("make the input", self._make)
        self._timed("copy it", self._copy)
        before = hashes(self._source)
        self._convert("convert", -1)
        first = hashes(self._output)
        differing = different_tensors(self._source, self._output)
        other_names = different_names(self._source, self._output)
        shutil.rmtree(self._output)
        self._convert("convert, killed half-way", self._total // 2)
        assert not self._output.exists(), "a killed conversion left an output"
        self._convert("go on", -1)
        checks = {
            "the same bytes after a kill": hashes(self._output) == first,
            "every tensor as in the input": not differing,
            "every name as in the input": not other_names,
            "the input as it was": hashes(self._source) == before,
            f"memory below {MOST_MEMORY} of the largest shard": all(
                row["memory / largest shard"] <= MOST_MEMORY
                for row in self._rows
                if row["memory / largest shard"] != ""
            ),
        }
        for name, holds in checks.items():
            print(f"{'yes' if holds else 'NO'}: {name}")
        self._write(all(checks.values()))
        return 0 if all(checks.values()) else 1

    def _make(self) -> None:
        make = MAKERS[self._args.model]
        make(self._source, self._args.gigabytes, self._args.shard, self._args.layout)
        sizes = [p.stat().st_size for p in self._source.iterdir()]
        self._largest, self._total = max(sizes), sum(sizes)
        self._shards = sum(size > 10**6 for size in sizes)

    def _copy(self) -> None:
        target = self._source.with_name("copy")
        target.mkdir()
        for path in self._source.iterdir():
            shutil.copyfile(path, target / path.name)
            descriptor = os.open(target / path.name, os.O_RDONLY)
            os.fsync(descriptor)  # a conversion does so, too
            os.close(descriptor)
        shutil.rmtree(target)

    def _timed(self, step: str, do: Callable[[], None]) -> None:
        started = time.perf_counter()
        do()
        self._row(step, time.perf_counter() - started)

    def _convert(self, step: str, limit: int) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "0"]
        command += ["--model", self._args.model, "--method", self._args.method]
        done = subprocess.run(
            [*command, "--worker", str(self._source), str(self._output), str(limit)],
            stdout=subprocess.PIPE,
            text=True,
        )
        if limit >= 0:
            assert done.returncode == -signal.SIGKILL, f"ended with {done.returncode}"
            self._row(step, None)
            return
        assert done.returncode == 0, f"ended with {done.returncode}"
        told = json.loads(done.stdout.splitlines()[-1])
        self._row(step, told["seconds"], told)

    def _row(self, step: str, seconds: float | None, told: dict[str, Any] | None = None) -> None:
        told = told or {}
        grown, peak = told.get("grown"), told.get("peak")
        row = {
            "model": self._args.model,
            "method": self._args.method,
            "gigabytes": round(self._total / 1e9, 2),
            "layout": self._args.layout,
            "shards": self._shards,
            "largest shard (MB)": round(self._largest / 1e6),
            "step": step,
            "seconds": "" if seconds is None else round(seconds, 1),
            "memory (MB)": "" if grown is None else round(grown / 1e6),
            **{f"{part} (MB)": round(told[part] / 1e6) if part in told else "" for part in PARTS},
            "memory with imports (MB)": "" if peak is None else round(peak / 1e6),
            "memory / largest shard": "" if grown is None else round(grown / self._largest, 3),
        }
        print({key: value for key, value in row.items() if value != ""}, flush=True)
        self._rows.append(row)

    def _write(self, passed: bool) -> None:
        RESULTS.parent.mkdir(exist_ok=True)
        kept: list[dict[str, Any]] = []
        if RESULTS.is_file():
            with RESULTS.open(newline="") as file:
                # older rows have no model: there was one
                kept = [{"model": "bloom", "method": "auto", **row} for row in csv.DictReader(file)]
        extra = {"torch": torch.__version__, "cpu": platform.machine(), "passed": passed}
        rows = [{**row, **extra} for row in self._rows]
        key = ("model", "method", "gigabytes", "layout", "shards")
        new = {tuple(str(row[k]) for k in key) for row in rows}
        kept = [row for row in kept if tuple(row[k] for k in key) not in new]
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows([*kept, *rows])


# -- the process that converts -------------------------------------------------------------


def work(source: Path, output: Path, limit: int, args: argparse.Namespace) -> int:
    """Convert; killed after `limit` bytes unless that is negative."""
    import timm.models  # noqa: F401
    import transformers.models.bloom.modeling_bloom  # noqa: F401

    from flashbias_convert.checkpoint import convert_checkpoint
    from flashbias_convert.options import DecomposeOptions

    torch.set_num_threads(1)
    options = DecomposeOptions(method=args.method)

    def copying(done: int, total: int, name: str) -> None:
        if 0 <= limit < done:
            os.kill(os.getpid(), signal.SIGKILL)

    with tempfile.TemporaryDirectory() as folder:  # whatever is imported late
        make = MAKERS[args.model]
        make(Path(folder) / "warm", 0, 1, "safetensors", small=True)
        convert_checkpoint(Path(folder) / "warm", options=options)
    Path("/proc/self/clear_refs").write_text("5")
    before, started = high_water(), time.perf_counter()
    with Parts(source.parent) as parts:
        convert_checkpoint(source, output, options=options, copying=copying)
    seconds, peak = time.perf_counter() - started, high_water()
    told = {"seconds": seconds, "grown": peak - before, "peak": peak, **parts.grown()}
    print(json.dumps(told))
    return 0


class Parts:
    """Inside, a thread looks at what resident memory consists of.

    Args:
        folder: what is mapped of it is of checkpoints, all other files are libraries.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended = str(folder.resolve()), threading.Event()
        self._before = self._most = self._look()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Parts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def grown(self) -> dict[str, int]:
        """Most bytes of each part, beyond what it had before."""
        return {part: self._most[part] - self._before[part] for part in PARTS}

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            now = self._look()
            self._most = {part: max(now[part], self._most[part]) for part in PARTS}

    def _look(self) -> dict[str, int]:
        found, of = dict.fromkeys(PARTS, 0), ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, *rest = line.split()
            if not first.endswith(":"):
                name = " ".join(rest[4:])
                of = "mapped of checkpoints" if self._folder in name else "mapped of libraries"
            elif first == "Rss:":
                found[of] += 1024 * int(rest[0])
            elif first == "Anonymous:":  # of private maps, too, what was written to
                found["allocated"] += 1024 * int(rest[0])
                found[of] -= 1024 * int(rest[0])
        return found


def high_water() -> int:
    """Most bytes of resident memory since that was last reset."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


# -- the input -----------------------------------------------------------------------------


def make_bloom(
    folder: Path, gigabytes: float, shard: float, layout: str, small: bool = False
) -> None:
    """A BLOOM in bfloat16 in shards, with random bits as weights."""
    import transformers

    hidden = 64 if small else HIDDEN
    layers = max(1, round(gigabytes * 1e9 / (24 * hidden**2)))
    config = transformers.BloomConfig(
        hidden_size=hidden, n_layer=layers, n_head=hidden // 32, vocab_size=VOCABULARY
    )
    config.architectures = ["BloomForCausalLM"]
    with torch.device("meta"):
        model = transformers.BloomForCausalLM(config).to(torch.bfloat16)
    folder.mkdir()
    config.save_pretrained(folder)
    state = {k: t for k, t in model.state_dict().items() if k != "lm_head.weight"}
    random = np.random.Generator(np.random.SFC64(0))
    write(folder, state, shard, layout, lambda key: random_bits(random, state[key]))


def make_swin(
    folder: Path, gigabytes: float, shard: float, layout: str, small: bool = False
) -> None:
    """A SwinV2-Base with windows of 24 x 24 in float32, with as many blocks as fit."""
    import timm

    name = "swinv2_base_window12to24_192to384"
    depth = max(2, round((gigabytes * 1e9 - 110e6) / 12.7e6))  # of the third stage
    sizes: dict[str, Any] = {"depths": (2, 2, depth, 2)}
    if small:
        sizes = {"depths": (1, 1), "embed_dim": 32, "num_heads": (2, 4), "img_size": 96}
    torch.manual_seed(0)
    model = timm.create_model(name, **sizes)
    for key, parameter in model.named_parameters():
        if "cpb_mlp" in key:  # at initialisation the bias is too small to matter
            parameter.data.mul_(4)
    state = model.state_dict()
    folder.mkdir()
    config = {"architecture": name, "model_args": sizes, "num_classes": 1000}
    (folder / "config.json").write_text(json.dumps(config))
    write(folder, state, shard, layout, lambda key: state[key].clone())


def make_swin_of_transformers(
    folder: Path, gigabytes: float, shard: float, layout: str, small: bool = False
) -> None:
    """A Swin-Large in float32 with windows of 12 x 12, with as many blocks as fit."""
    import transformers

    depth = max(2, round((gigabytes * 1e9 - 276e6) / 28.4e6))  # of the third stage
    sizes: dict[str, Any] = {"embed_dim": 192, "depths": [2, 2, depth, 2], "window_size": 12}
    sizes |= {"num_heads": [6, 12, 24, 48], "image_size": 384}
    if small:
        sizes = {"embed_dim": 32, "depths": [1, 1], "num_heads": [1, 2], "window_size": 8}
        sizes |= {"image_size": 64}
    torch.manual_seed(0)
    model = transformers.SwinForImageClassification(transformers.SwinConfig(**sizes))
    for key, parameter in model.named_parameters():
        if "bias_table" in key:  # zeros at initialisation
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=f"{round(1e3 * shard)}MB")
    if layout != "safetensors":
        raise SystemExit("transformers saves safetensors alone")


def write(
    folder: Path,
    state: dict[str, Tensor],
    shard: float,
    layout: str,
    value: Callable[[str], Tensor],
) -> None:
    """Tensors in shards of about that many gigabytes, with an index."""
    groups = list(in_groups(state, shard * 1e9))
    stem = "model" if layout == "safetensors" else "pytorch_model"
    where = {}
    for at, group in enumerate(groups, 1):
        name = f"{stem}-{at:05d}-of-{len(groups):05d}.{layout}"
        tensors = {key: value(key) for key in group}
        if layout == "bin":
            torch.save(tensors, folder / name)
        else:
            save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(group, name)
    (folder / f"{stem}.{layout}.index.json").write_text(json.dumps({"weight_map": where}))


def in_groups(state: dict[str, Tensor], size: float) -> Iterator[list[str]]:
    """Names of tensors that together have about `size` bytes."""
    group: list[str] = []
    for key, tensor in state.items():
        if group and sum(state[k].nbytes for k in group) + tensor.nbytes > size:
            yield group
            group = []
        group.append(key)
    yield group


def random_bits(random: np.random.Generator, like: Tensor) -> Tensor:
    """Random bits of a shape and dtype."""
    bits = np.frombuffer(random.bytes(like.nbytes), dtype=np.uint8)
    return torch.from_numpy(bits.copy()).view(like.dtype).reshape(like.shape)


#: by `--model`
MAKERS = {
    "bloom": make_bloom,
    "swin": make_swin,
    "swin-transformers": make_swin_of_transformers,
}


# -- comparing -----------------------------------------------------------------------------


def hashes(folder: Path) -> dict[str, str]:
    """A hash of every file."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "blake2b").hexdigest()
    return found


def different_tensors(source: Path, output: Path) -> list[str]:
    """Names of the tensors of the input that the output lacks or has with other bytes."""
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    differing = []
    for path in shards_of(source):
        for key, tensor in tensors_of(path):
            if key not in index:
                differing.append(key)
                continue
            with safe_open(output / index[key], framework="pt") as file:
                found = file.get_tensor(key)
            same = found.dtype == tensor.dtype and found.shape == tensor.shape
            if not same or not torch.equal(found.view(torch.int16), tensor.view(torch.int16)):
                differing.append(key)
    return differing


def different_names(source: Path, output: Path) -> set[str]:
    """Names that are in one of two shards that belong together; of terms, those of no term."""
    written = [path for path in shards_of(output) if path.name != TERMS_NAME]
    different = {key for key in names_of(output / TERMS_NAME) if "score_bias." not in key}
    for before, after in zip(shards_of(source), written, strict=True):
        different |= names_of(before) ^ names_of(after)
    return different


def shards_of(folder: Path) -> list[Path]:
    """Files of weights, in order."""
    return sorted(folder.glob("*model-*"))


def names_of(path: Path) -> set[str]:
    """Names of the tensors of a shard."""
    return {key for key, _ in tensors_of(path)}


def tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor of a shard."""
    if path.suffix == ".bin":
        yield from torch.load(path, mmap=True, weights_only=True).items()
        return
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            yield key, file.get_tensor(key)


if __name__ == "__main__":
    sys.exit(main())
