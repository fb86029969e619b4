"""Patched models on two GPUs: the same outputs as on one, and time against one.

    python scripts/check_two_gpus.py                              # two CUDA cards, NCCL
    python scripts/check_two_gpus.py --backend gloo --device cpu  # two processes on this machine
    python scripts/check_two_gpus.py --only 'tensor*'

Every case has processes of its own, so that one that fails or hangs ends no other. What runs on
two is compared with what runs on one: both with the same model in float64, of whose outputs two
may be twice as far off as one, as in the tests. DDP and FSDP2 take a half of the batch each,
tensor parallelism all of it with a half of the heads, `device_map` a half of the layers. Sites
whose SVDs are shared out must get the same plan, bit by bit. Writes
`scripts/results/check_two_gpus.csv`.
"""

from __future__ import annotations

import argparse
import copy
import csv
import fnmatch
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

RESULTS = Path(__file__).resolve().parent / "results/check_two_gpus.csv"
WORLD = 2
WAYS = ("ddp", "fsdp", "tensor", "device_map", "spread")
COLUMNS = (
    "way", "model", "dtype", "status", "reason", "same_bits", "max_error_two", "max_error_one",
    "rms_error_two", "rms_error_one", "seconds_one", "seconds_two", "two_over_one", "samples",
    "size", "backend", "device", "torch",
)  # fmt: skip


def main() -> int:
    """Run every case, print a line for each, write the table; 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="nccl", help="of torch.distributed")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["tiny", "small"], help="default tiny on the CPU")
    parser.add_argument("--repeats", type=int, default=20, help="of each timing")
    parser.add_argument("--limit", type=float, default=180, help="seconds per case")
    parser.add_argument("--only", default="*", help="cases, such as 'ddp bloom *'")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = options.size or ("small" if options.device == "cuda" else "tiny")
    if options.case:
        return run_case(options)
    if options.device == "cuda" and torch.cuda.device_count() < WORLD:
        print(f"{torch.cuda.device_count()} CUDA cards, {WORLD} are needed", file=sys.stderr)
        return 1
    rows = [row_of(case, options) for case in cases(options)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    bad = [f"{r['way']} {r['model']} {r['dtype']}" for r in rows if r["status"] == "failed"]
    print(f"{len(rows) - len(bad)} of {len(rows)} cases did not fail", *bad, sep="\n  ")
    return int(bool(bad) or not rows)


def cases(options: argparse.Namespace) -> list[str]:
    """Way, model and dtype of every case, in words."""
    dtypes = ("float32", "bfloat16") if options.device == "cuda" else ("float32",)
    every = [f"{way} {m} {d}" for d in dtypes for m in ("swin", "bloom") for way in WAYS[:-1]]
    return [case for case in [*every, "spread swin float32"] if fnmatch.fnmatch(case, options.only)]


def row_of(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case in processes of its own."""
    way, model, dtype = case.split()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    row: dict[str, Any] = {
        "way": way, "model": model, "dtype": dtype, "size": options.size,
        "backend": options.backend, "device": name, "torch": torch.__version__,
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", __file__, "--case", case]
    for option in ("backend", "device", "size", "repeats"):
        command += [f"--{option}", str(getattr(options, option))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = process.communicate(timeout=options.limit)
        found = [line for line in said.splitlines() if line.startswith('{"status"')]
        lines = errors.strip().splitlines() or ["it said nothing"]
        row |= json.loads(found[-1]) if found else {"status": "failed", "reason": lines[-1]}
        if row["status"] == "failed":
            print(errors[-3000:], file=sys.stderr)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.communicate()
        row |= {"status": "failed", "reason": f"not done after {options.limit:g} s"}
    print({k: v for k, v in row.items() if v != ""}, flush=True)
    return row


# -- the processes of one case -------------------------------------------------------------


def run_case(options: argparse.Namespace) -> int:
    """Start the processes of a case and print what the first one found."""
    way = options.case.split()[0]
    if way == "device_map":
        found = over_layers(options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(one_process, (options, folder), nprocs=WORLD, start_method="spawn")
            found = json.loads((Path(folder) / "found.json").read_text())
    print(json.dumps(found))
    return 0


def one_process(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One of the processes that share a case."""
    place = torch.device(options.device, rank if options.device == "cuda" else None)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        options.backend, init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD
    )
    try:
        way = options.case.split()[0]
        found = shared_svd(options, place) if way == "spread" else served(options, place, rank)
        everywhere: list[Any] = [None] * WORLD
        dist.all_gather_object(everywhere, found)
        if rank == 0:
            worst = next((f for f in everywhere if f["status"] != "passed"), found)
            (Path(folder) / "found.json").write_text(json.dumps(worst))
    finally:
        dist.destroy_process_group()


def served(options: argparse.Namespace, place: torch.device, rank: int) -> dict[str, Any]:
    """A model on this process's device alone, then on both."""
    way, name, dtype = options.case.split()
    model, x, truth = prepare(name, options.size, getattr(torch, dtype), place)
    one = outputs(model, x)
    dist.barrier()
    seconds_one = timed(lambda: outputs(model, x), options.repeats, place)
    wrapped = wrap(way, name, model, place)
    own = x if way == "tensor" else x.chunk(WORLD)[rank]
    part = outputs(wrapped, own)
    seconds_two = timed(lambda: outputs(wrapped, own), options.repeats, place, dist.barrier)
    if way != "tensor":
        parts = [torch.empty_like(part) for _ in range(WORLD)]
        dist.all_gather(parts, part.contiguous())
        part = torch.cat(parts)
    return judged(part, one, truth) | times(seconds_one, seconds_two, len(x))


def wrap(way: str, name: str, model: nn.Module, place: torch.device) -> nn.Module:
    """The model on all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    from flashbias_convert.parallel import ColwiseFused, shard_sites
    from flashbias_convert.swap import patched_modules

    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(place.type, (WORLD,))
    sites = patched_modules(model)
    if way == "fsdp":
        for site in sites:
            fully_shard(site, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    for site in sites:
        if name == "bloom":
            plan = {"query_key_value": ColwiseParallel(), "dense": RowwiseParallel()}
        else:
            plan = {"qkv": ColwiseFused(), "proj": RowwiseParallel()}
        parallelize_module(site, mesh, plan)
    shard_sites(model, mesh)
    return model


def over_layers(options: argparse.Namespace) -> dict[str, Any]:
    """Half of the layers on each card, by accelerate; on the CPU half of them on the disk."""
    try:
        from accelerate import dispatch_model, infer_auto_device_map
    except ImportError:
        return {"status": "skipped", "reason": "accelerate is not installed"}
    from flashbias_convert.swap import patched_modules

    _, name, dtype = options.case.split()
    place = torch.device(options.device, 0 if options.device == "cuda" else None)
    model, x, truth = prepare(name, options.size, getattr(torch, dtype), place)
    one = outputs(model, x)
    seconds_one = timed(lambda: outputs(model, x), options.repeats, place)
    model.to("cpu")
    size = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    first, second = (0, 1) if place.type == "cuda" else ("cpu", "disk")
    places = infer_auto_device_map(
        model,
        max_memory={first: size * 6 // 10, second: 2 * size},
        no_split_module_classes=["SwinTransformerV2Block", "BloomBlock"],
    )
    if set(places.values()) != {first, second}:
        return {"status": "failed", "reason": f"everything is on {set(places.values())}"}
    with tempfile.TemporaryDirectory() as folder:
        spread = dispatch_model(
            model,
            places,
            main_device="cpu" if place.type == "cpu" else None,
            offload_dir=folder,
            preload_module_classes=sorted({type(s).__name__ for s in patched_modules(model)}),
        )
        two = outputs(spread, x).to(place)
        seconds_two = timed(lambda: outputs(spread, x), options.repeats, place)
    return judged(two, one, truth) | times(seconds_one, seconds_two, len(x))


def shared_svd(options: argparse.Namespace, place: torch.device) -> dict[str, Any]:
    """The SVDs of all sites on this process alone, then shared out."""
    from flashbias_convert import inspect_model

    model, _ = make("swin", options.size)
    model.to(place)

    def plan(**given: Any) -> Any:
        return inspect_model(model, method="svd", energy=0.9, force_all=True, **given)

    alone, shared = plan(), plan(group=dist.group.WORLD)  # libraries are loaded, too
    repeats = max(1, options.repeats // 5)
    seconds_one = timed(plan, repeats, place, dist.barrier)
    seconds_two = timed(lambda: plan(group=dist.group.WORLD), repeats, place, dist.barrier)
    terms = [
        (a, b)
        for mine, theirs in zip(alone.patched, shared.patched, strict=True)
        for (_, a), (_, b) in zip(
            mine.bias.named_tensors(), theirs.bias.named_tensors(), strict=True
        )
    ]
    same = alone.to_json() == shared.to_json() and all(torch.equal(a, b) for a, b in terms)
    here = all(b.device == place for _, b in terms)
    reason = "" if same else "the plans differ"
    reason = reason if here else "terms are not where the model is"
    status = "passed" if terms and same and here else "failed"
    found = {"status": status, "reason": reason, "same_bits": same}
    return found | times(seconds_one, seconds_two, len(alone.patched))


# -- models, outputs and time --------------------------------------------------------------


def make(name: str, size: str) -> tuple[nn.Module, Tensor]:
    """A model on the CPU, the same on every process, and a batch of inputs."""
    torch.manual_seed(0)
    small = size == "small"
    if name == "swin":
        import timm

        model = timm.create_model(
            "swinv2_tiny_window8_256",
            img_size=256 if small else 32,
            patch_size=4 if small else 2,
            embed_dim=96 if small else 16,
            depths=[2, 2, 6, 2] if small else [2, 1],
            num_heads=[4, 4, 8, 16] if small else [2, 2],
            window_size=16 if small else 8,
            num_classes=10,
        )
        for key, parameter in model.named_parameters():
            if key.endswith(("norm1.weight", "norm2.weight")):  # zero: blocks would do nothing
                parameter.data.fill_(1)
            elif "cpb_mlp" in key:  # as it begins, the bias is too small to matter
                parameter.data.mul_(4)
        return model.eval(), torch.randn(32 if small else 4, 3, *(2 * [256 if small else 32]))
    import transformers

    config = transformers.BloomConfig(
        vocab_size=1000 if small else 97,
        hidden_size=1024 if small else 48,
        n_layer=8 if small else 2,
        n_head=16 if small else 6,
    )
    bloom = transformers.BloomForCausalLM(config).eval()
    return bloom, torch.randint(3, 97, (8 if small else 4, 1024 if small else 20))


def prepare(
    name: str, size: str, dtype: torch.dtype, place: torch.device
) -> tuple[nn.Module, Tensor, Tensor]:
    """A patched model and its inputs on a device, and what it computes in float64."""
    from flashbias_convert import patch_model

    model, x = make(name, size)
    method = {"method": "svd", "energy": 0.9} if name == "swin" else {"method": "auto"}
    patch_model(model, force_all=True, **method)
    model, x = model.to(place, dtype), x.to(place)
    x = x.to(dtype) if x.is_floating_point() else x
    wide = copy.deepcopy(model).double()
    samples = x.double().chunk(len(x)) if x.is_floating_point() else x.chunk(len(x))
    truth = torch.cat([outputs(wide, sample) for sample in samples])
    return model, x, truth


@torch.no_grad()
def outputs(model: Any, x: Tensor) -> Tensor:
    """Logits."""
    out = model(x)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found


def judged(two: Tensor, one: Tensor, truth: Tensor) -> dict[str, Any]:
    """Errors of both against float64; two may be twice as far off as one, and one unit more."""
    unit = torch.finfo(one.dtype).eps * float(truth.abs().max())
    errors = {"two": (two.double() - truth).abs(), "one": (one.double() - truth).abs()}
    largest = {k: float(e.max()) for k, e in errors.items()}
    mean = {k: float(e.square().mean().sqrt()) for k, e in errors.items()}
    finite = all(bool(x.isfinite().all()) for x in (two, one, truth))
    close = all(e["two"] <= 2 * e["one"] + unit for e in (largest, mean))
    passed = finite and close and two.shape == one.shape
    return {
        "status": "passed" if passed else "failed",
        "reason": "" if passed else "the outputs differ by more than rounding",
        "same_bits": torch.equal(two, one),
        **{f"max_error_{k}": f"{v:.3g}" for k, v in largest.items()},
        **{f"rms_error_{k}": f"{v:.3g}" for k, v in mean.items()},
    }


def timed(
    call: Callable[[], Any],
    repeats: int,
    place: torch.device,
    before: Callable[[], Any] = lambda: None,
) -> float:
    """Median of the seconds of a call; `before` each of them the processes may meet."""
    taken = []
    for turn in range(repeats + 2):
        before()
        if place.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if place.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 2:
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def times(one: float, two: float, samples: int) -> dict[str, Any]:
    """As columns of the table."""
    return {
        "seconds_one": f"{one:.6f}",
        "seconds_two": f"{two:.6f}",
        "two_over_one": f"{two / one:.3f}",
        "samples": samples,
    }


if __name__ == "__main__":
    sys.exit(main())
