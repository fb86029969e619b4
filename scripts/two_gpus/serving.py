"""A model on one device and on two: wrapped, split, or spread by layers."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import tempfile
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import got_ocr
from .measuring import held, judged, megabytes, outputs, peak, timed, times
from .working import WORLD, barrier


def served(case: str, options: argparse.Namespace, place: torch.device, rank: int) -> Any:
    """A model on this process's device alone, then on both."""
    way, name, dtype = case.split()
    model, x, truth = prepare(name, options.size, getattr(torch, dtype), place)
    one = outputs(model, x)
    barrier(place)
    seconds_one = timed(lambda: outputs(model, x), options.repeats, place)
    peak_one, held_one = peak(lambda: outputs(model, x), place), held(model)
    wrapped = wrap(way, copy.deepcopy(model), place)
    own = x if way == "tensor" else x.chunk(WORLD)[rank]
    part = outputs(wrapped, own)
    seconds_two = timed(
        lambda: outputs(wrapped, own), options.repeats, place, lambda: barrier(place)
    )
    settle(wrapped)
    peak_two = peak(lambda: outputs(wrapped, own), place)
    settle(wrapped)
    if way != "tensor":
        parts = [torch.empty_like(part) for _ in range(WORLD)]
        dist.all_gather(parts, part.contiguous())
        part = torch.cat(parts)
    found = judged(part, one, truth) | times(seconds_one, seconds_two, len(x))
    found |= megabytes("held_mb_one", held_one) | megabytes("held_mb_two", held(wrapped))
    return found | megabytes("peak_mb_one", peak_one) | megabytes("peak_mb_two", peak_two)


def wrap(way: str, model: nn.Module, place: torch.device) -> nn.Module:
    """The model on all processes."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from flashbias_convert.swap import patched_modules

    from .splitting import by_heads

    if way == "ddp":
        ids = [place.index] if place.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    mesh = _mesh(place.type)
    if way == "fsdp":
        for site in patched_modules(model):
            fully_shard(site, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return by_heads(model, mesh)


@cache
def _mesh(kind: str) -> Any:
    """All processes; made once, for all cases."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (WORLD,))


def settle(model: nn.Module) -> None:
    """Give back what FSDP2 keeps gathered after a call: the outermost weights."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _alone(case: str, options: argparse.Namespace, place: torch.device) -> tuple[Any, ...]:
    """The patched model, its inputs and the truth; its outputs on one device, and the seconds."""
    _way, name, dtype = case.split()
    kept, x, truth = prepare(name, options.size, getattr(torch, dtype), place)
    one = outputs(kept, x)
    return kept, x, truth, one, timed(lambda: outputs(kept, x), options.repeats, place)


def over_layers(case: str, options: argparse.Namespace, place: torch.device, _: int) -> Any:
    """Half of the layers on each card, by accelerate; on the CPU half of them on the disk."""
    try:
        from accelerate import dispatch_model, infer_auto_device_map
    except ImportError:
        return {"status": "skipped", "reason": "accelerate is not installed"}
    from flashbias_convert.swap import patched_modules

    kept, x, truth, one, seconds_one = _alone(case, options, place)
    model = copy.deepcopy(kept).to("cpu")
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
        cards = torch.device(place.type)  # both of them
        seconds_two = timed(lambda: outputs(spread, x), options.repeats, cards)
        sizes = megabytes("held_mb_one", held(kept)) | megabytes("held_mb_two", held(spread))
    return judged(two, one, truth) | times(seconds_one, seconds_two, len(x)) | sizes


def offloaded(case: str, options: argparse.Namespace, place: torch.device, _: int) -> Any:
    """All weights on the CPU, by accelerate, which brings them to the device for each call."""
    try:
        from accelerate import cpu_offload
    except ImportError:
        return {"status": "skipped", "reason": "accelerate is not installed"}
    from flashbias_convert.swap import patched_modules

    kept, x, truth, one, seconds_one = _alone(case, options, place)
    whole = sorted({type(site).__name__ for site in patched_modules(kept)})
    model = copy.deepcopy(kept).to("cpu")
    away = cpu_offload(model, execution_device=place, preload_module_classes=whole)
    if not all(parameter.is_meta for parameter in away.parameters()):
        return {"status": "failed", "reason": "some weights stayed"}
    two = outputs(away, x).to(place)
    seconds_two = timed(lambda: outputs(away, x), options.repeats, place)
    return judged(two, one, truth) | times(seconds_one, seconds_two, len(x))


def planned(case: str, options: argparse.Namespace, place: torch.device, rank: int) -> Any:
    """A GOT-OCR 2, whose text transformers splits by its own plan and whose vision is patched."""
    import transformers
    from transformers.distributed import DistributedConfig

    from flashbias_convert import patch_model

    dtype = getattr(torch, case.split()[2])
    model = got_ocr.make()
    image = torch.randn(1, 3, got_ocr.IMAGE_SIZE, got_ocr.IMAGE_SIZE)
    inputs = {"input_ids": got_ocr.text().to(place), "pixel_values": image.to(place)}
    paths: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(paths)
    model.save_pretrained(paths[0])
    barrier(place)
    card = str(place.index or 0)  # transformers takes it from what a launcher says
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": card, "WORLD_SIZE": str(WORLD)}
    split: Any = transformers.GotOcr2ForConditionalGeneration.from_pretrained(
        paths[0], distributed_config=DistributedConfig(tp_size=WORLD, tp_plan="auto")
    ).eval()
    barrier(place)
    if rank == 0:
        shutil.rmtree(paths[0])
    model = model.to(place)
    for made in (model, split):
        patch_model(made, force_all=True)
    model = model.to(dtype)

    @torch.no_grad()
    def call(made: Any, kind: torch.dtype = dtype) -> Tensor:
        found = made(**{**inputs, "pixel_values": inputs["pixel_values"].to(kind)}).logits
        return found.full_tensor() if hasattr(found, "full_tensor") else found

    truth = call(copy.deepcopy(model).double(), torch.float64)
    one, two = call(model), call(split).to(place)
    seconds_one = timed(lambda: call(model), options.repeats, place)
    seconds_two = timed(lambda: call(split), options.repeats, place, lambda: barrier(place))
    return judged(two, one, truth) | times(seconds_one, seconds_two, 1)


# -- models --------------------------------------------------------------------------------


def make(name: str, size: str, stages: int = 4) -> tuple[nn.Module, Tensor]:
    """A model on the CPU, the same on every process, and a batch of inputs.

    Args:
        name, size: see `check_two_gpus.py`.
        stages: at most so many of a Swin.
    """
    torch.manual_seed(0)
    small = size == "small"
    if name == "swin":
        import timm

        model = timm.create_model(
            "swinv2_tiny_window8_256",
            img_size=256 if small else 32,
            patch_size=4 if small else 2,
            embed_dim=96 if small else 16,
            depths=([2, 2, 6, 2] if small else [2, 1])[:stages],
            num_heads=([4, 4, 8, 16] if small else [2, 2])[:stages],
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


@lru_cache(maxsize=1)
def prepare(
    name: str, size: str, dtype: torch.dtype, place: torch.device
) -> tuple[nn.Module, Tensor, Tensor]:
    """A patched model and its inputs on a device, and what it computes in float64."""
    from flashbias_convert import patch_model

    model, x = make(name, size)
    model, x = model.to(place), x.to(place)  # first: a card is quicker at SVDs
    method = {"method": "svd", "energy": 0.9} if name == "swin" else {"method": "auto"}
    patch_model(model, force_all=True, **method)
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    wide = copy.deepcopy(model).double()
    samples = x.double().chunk(len(x)) if x.is_floating_point() else x.chunk(len(x))
    truth = torch.cat([outputs(wide, sample) for sample in samples])
    return model, x, truth
