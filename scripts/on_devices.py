"""What models that are split over several cards really take on each of them; see
`memory_per_device.py`.

Where there are as many cards as asked for, each gets a process, and they talk through NCCL. Where
there are fewer, one card is the first of a group whose others are not there: torch's fake process
group, whose collectives allocate what others do and move nothing. Outputs mean nothing then, memory
is the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from on_one_card import OnCard, in_bfloat16, measure, pairformer, swin_sizes
from pairformer_ways import dense
from torch import nn
from two_gpus.splitting import by_heads

from flashbias_convert import patch_model

#: how a model is spread over cards
FSDP2, HEADS = "FSDP2", "heads split"
#: of a group whose other cards are not there
FAKE = "fake group"


@dataclass(frozen=True)
class Spread:
    """A model that is spread over cards.

    Attributes:
        what: is measured.
        way: `FSDP2` or `HEADS`.
        layers: how many times what is measured counts; all others hold as much.
    """

    what: str
    way: str
    layers: int = 1


SPREAD = {
    "SwinV2-G": (
        Spread("weights and terms, exact", FSDP2),
        Spread("weights and terms, exact", HEADS),
    ),
    "BLOOM-176B": (
        Spread("all layers and their terms", FSDP2),
        Spread("one layer and its terms, times 70", HEADS, 70),
    ),
    "Pairformer": (Spread("a call, dense", FSDP2),),
}  # fmt: skip


def on_devices(
    name: str, spread: Spread, devices: int, tiny: bool, kind: str
) -> tuple[OnCard, str]:
    """The most that one of some devices takes, and which cards these were.

    Args:
        name: a key of `SPREAD`.
        spread: how the model is spread.
        devices: so many.
        tiny: a small model.
        kind: "cuda", or "cpu" where nothing is allocated on a card, to try this module.
    """
    there = torch.cuda.device_count() if kind == "cuda" else 1
    fake = there < devices
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, spread, devices, tiny, kind, fake, folder)
        mp.spawn(_process, arguments, nprocs=1 if fake else devices)  # type: ignore[no-untyped-call]
        found = [OnCard(**json.loads(file.read_text())) for file in Path(folder).glob("*.json")]
    most = OnCard(*(max(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))
    card = torch.cuda.get_device_name() if kind == "cuda" else "none"
    return most, f"{card}, {FAKE} of {devices}" if fake else f"{devices} x {card}"


#: the terms that a model's sites keep, by their name in the table of formulas
TERMS = {"SwinV2-G": "terms, exact", "BLOOM-176B": "terms, ALiBi"}


def by_formula(
    name: str, spread: Spread, devices: int, rows: Sequence[Mapping[str, Any]], outside: int
) -> int:
    """Bytes of weights, buffers and terms on each of some devices.

    Args:
        name, spread, devices: see `on_devices`.
        rows: of the model in the table of `memory_per_device`.
        outside: bytes of the weights that belong to no layer, which are not there where one layer
            counts for all.
    """
    known = {(r["what"], r["way"], int(r["devices"])): int(r["formula_bytes"]) for r in rows}
    parts = devices if spread.way == HEADS else 1
    if spread.way == HEADS:
        weights = known["weights", "tensor parallel", devices]
    else:
        weights = -(-known["weights", "DDP", 1] // devices)
    weights -= outside if spread.layers > 1 else 0
    terms = known[TERMS[name], HEADS, parts] if name in TERMS else 0
    return weights + known["buffers", "on each device", 1] + terms


def fits(formula: int, spread: Spread) -> bool:
    """Whether the present card can hold it, with a sixth for what is gathered and computed."""
    total = int(torch.cuda.get_device_properties(0).total_memory)
    return formula // spread.layers < total * 5 // 6


def _process(
    rank: int, name: str, spread: Spread, devices: int, tiny: bool, kind: str, fake: bool,
    folder: str,
) -> None:  # fmt: skip
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    if fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=devices)
    else:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(devices), "LOCAL_RANK": str(rank)}
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    mesh = dist.init_device_mesh(kind, (devices,))
    load, call = {"SwinV2-G": _swin, "BLOOM-176B": _bloom, "Pairformer": _pairformer}[name](
        spread, mesh, device, tiny
    )
    found = measure(load, call) if kind == "cuda" else _try(load, call)
    found = found.times(spread.layers)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(dataclasses.asdict(found)))
    dist.destroy_process_group()


@torch.no_grad()
def _try(load: Callable[[], Any], call: Callable[[Any], Any]) -> OnCard:
    """Without a card there is nothing to measure: that it runs."""
    call(load())
    return OnCard(0, 0, 0)


Loaded = tuple[Callable[[], Any], Callable[[Any], Any]]


def _sharded(model: nn.Module, blocks: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh)
    # a list has no call, and nothing but its blocks
    return model if isinstance(model, nn.ModuleList) else fully_shard(model, mesh=mesh)


def _swin(spread: Spread, mesh: Any, device: str, tiny: bool) -> Loaded:
    """Made and patched on each card, then split."""
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    sizes = swin_sizes(tiny)
    side = sizes["img_size"]

    def load() -> nn.Module:
        model: Any = in_bfloat16(lambda: SwinTransformerV2(**sizes), device)
        patch_model(model, method="exact", force_all=True)
        if spread.way == HEADS:
            return by_heads(model, mesh)
        return _sharded(model, [b for layer in model.layers for b in layer.blocks], mesh)

    pixels = torch.zeros(1, 3, side, side, dtype=torch.bfloat16, device=device)
    return load, lambda model: model(pixels)


def _bloom(spread: Spread, mesh: Any, device: str, tiny: bool) -> Loaded:
    """All layers are split before any weight is there; one layer is made, then split."""
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomModel

    hidden, heads, vocabulary = (64, 8, 64) if tiny else (14336, 112, 250880)
    sizes: dict[str, Any] = {"hidden_size": hidden, "n_head": heads}

    def load() -> nn.Module:
        if spread.way == HEADS:
            config = BloomConfig(**sizes, n_layer=1, vocab_size=64)
            model: Any = in_bfloat16(lambda: BloomModel(config), device)
            patch_model(model, force_all=True)
            return by_heads(model, mesh)
        config = BloomConfig(**sizes, n_layer=3 if tiny else 70, vocab_size=vocabulary)
        model = in_bfloat16(lambda: BloomModel(config), "meta")
        _sharded(model, model.h, mesh)
        model.to_empty(device=device)
        for parameter in model.parameters():
            parameter.zero_()
        patch_model(model, force_all=True)
        return model

    ids = torch.zeros(1, 16 if tiny else 2048, dtype=torch.int64, device=device)
    return load, lambda model: model(ids, use_cache=False)


def _pairformer(_: Spread, mesh: Any, device: str, tiny: bool) -> Loaded:
    make, call = pairformer(dense, tiny, device)

    def load() -> nn.Module:
        model = make()
        return _sharded(model, model, mesh)

    return load, call
