"""What models really take on one card: their weights, loading them, and a call; see
`memory_per_device.py`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashbias_convert import patch_model

sys.path.insert(0, str(Path(__file__).resolve().parent / "paper"))
from pairformer_block import Pairformer
from pairformer_ways import dense, factors


@dataclass(frozen=True)
class OnCard:
    """Bytes on the card, beyond what lay there before.

    Attributes:
        held: after loading: weights, buffers and terms, as torch's allocator counts them.
        loading: most of them while weights and terms were made.
        call: most of them in one call, what is held included.
    """

    held: int
    loading: int
    call: int

    def times(self, count: int) -> OnCard:
        """Of `count` such layers, of which one computes at a time."""
        more = (count - 1) * self.held
        return OnCard(self.held + more, self.loading + more, self.call + more)


@torch.no_grad()
def measure(load: Callable[[], Any], call: Callable[[Any], Any]) -> OnCard:
    """Load something on the present card and call it once more than it takes to warm up."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load()
    gc.collect()
    torch.cuda.synchronize()
    loading, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    call(model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call(model)
    torch.cuda.synchronize()
    return OnCard(held - before, loading - before, torch.cuda.max_memory_allocated() - before)


def in_bfloat16(make: Callable[[], nn.Module], device: str) -> Any:
    """A model that is made on a device in bfloat16, with random weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return make().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def on_card(name: str, tiny: bool, device: str = "cuda") -> dict[str, tuple[OnCard, int]]:
    """By what was measured: bytes, and how many blocks were counted for each that was measured."""
    found = {}
    for what, load, call, count in cases(name, tiny, device):
        found[what] = measure(load, call).times(count), count
    return found


Case = tuple[str, Callable[[], Any], Callable[[Any], Any], int]


def cases(name: str, tiny: bool, device: str) -> list[Case]:
    """What is measured of a model: a name, how it is loaded and called, and times how many."""
    return {"SwinV2-G": _swin, "BLOOM-176B": _bloom, "Pairformer": _pairformer}[name](tiny, device)


def swin_sizes(tiny: bool) -> dict[str, Any]:
    """What SwinV2-G is made with, or a small model like it."""
    if tiny:
        sizes = {"img_size": 32, "window_size": 4, "num_heads": (2, 4), "embed_dim": 16}
        return sizes | {"depths": (2, 2)}
    sizes = {"img_size": 640, "window_size": 40, "num_heads": (16, 32, 64, 128)}
    return sizes | {"embed_dim": 512, "depths": (2, 2, 42, 4)}


def _swin(tiny: bool, device: str) -> list[Case]:
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    sizes = swin_sizes(tiny)
    pixels = torch.zeros(1, 3, sizes["img_size"], sizes["img_size"], dtype=torch.bfloat16)

    def load(method: str | None) -> Any:
        model = in_bfloat16(lambda: SwinTransformerV2(**sizes), device)
        if method is not None:
            patch_model(model, method=method, force_all=True)
        return model

    ways = {"weights": None, "weights and terms, exact": "exact"}
    return [
        (what, lambda m=method: load(m), lambda model: model(pixels.to(device)), 1)
        for what, method in ways.items()
    ]


def _bloom(tiny: bool, device: str) -> list[Case]:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomModel

    sizes = {"hidden_size": 64, "n_head": 4} if tiny else {"hidden_size": 14336, "n_head": 112}
    config = BloomConfig(**sizes, n_layer=1, vocab_size=64)
    ids = torch.zeros(1, 16 if tiny else 2048, dtype=torch.int64)

    def load(patched: bool) -> Any:
        model = in_bfloat16(lambda: BloomModel(config), device)
        if patched:
            patch_model(model, force_all=True)
        return model

    ways = {"one layer, times 70": False, "one layer and its terms, times 70": True}
    return [
        (
            what, lambda p=patched: load(p),
            lambda model: model(ids.to(device), use_cache=False), 70,
        )
        for what, patched in ways.items()
    ]  # fmt: skip


def _pairformer(tiny: bool, device: str) -> list[Case]:
    rank = 4 if tiny else 64
    ways = {"a call, dense": dense, f"a call, rank {rank}": factors(rank)}
    return [(what, *pairformer(way, tiny, device), 1) for what, way in ways.items()]


def pairformer(
    way: Any, tiny: bool, device: str
) -> tuple[Callable[[], nn.ModuleList], Callable[[Any], None]]:
    """What makes the 48 blocks of AlphaFold 3, or two, and what calls them at 1,024 tokens.

    Args:
        way: how pair bias is added, of `pairformer_ways`.
        tiny: a small model.
        device: for it.
    """
    blocks, tokens = (2, 16) if tiny else (48, 1024)

    def load() -> Any:
        return in_bfloat16(lambda: nn.ModuleList(Pairformer() for _ in range(blocks)), device)

    def call(model: Any) -> None:
        first: Any = model[0]
        single, pair = (
            getattr(first, name).norm.weight.shape[0]
            for name in ("single_transition", "pair_transition")
        )
        s = torch.randn(1, tokens, single, device=device, dtype=torch.bfloat16)
        z = torch.randn(tokens, tokens, pair, device=device, dtype=torch.bfloat16)
        for block in model:  # blocks hand on what has the shapes of their inputs
            block(s, z, way)

    return load, call
