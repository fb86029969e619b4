"""Functions that run on several processes at once, over gloo, and what they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from flashbias_convert import patch_model
from tests.checkpoint.models import ARGS, NAME, images
from tests.recipes.test_transformers_alibi import make
from tests.toy import TOY, make_input, make_model

Work = Callable[[int, int], dict[str, Any]]


def run(work: Work, world: int, folder: Path) -> list[dict[str, Any]]:
    """What a function of this kind of module returned on each of `world` processes."""
    context = mp.get_context("forkserver")  # everything is imported once
    context.set_forkserver_preload([__name__, "tests.parallel.serving"])
    folder.mkdir(exist_ok=True)
    arguments = (work, world, str(folder))
    mp.start_processes(_one, arguments, nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _one(rank: int, work: Work, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    try:
        torch.save(work(rank, world), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


# -- models, the same on every process -----------------------------------------------------


def toy() -> tuple[nn.Module, Tensor]:
    """A patched model whose bias is a parameter, and its input."""
    model = make_model()
    patch_model(model, recipes=[TOY], method="svd", energy=0.9)
    return model, make_input()


def swin(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A patched SwinV2 with two heads, shifted windows and cosine attention."""
    import timm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(NAME, **{**ARGS, "num_heads": [2, 2]}).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm1.weight", "norm2.weight")):  # zero: blocks would do nothing
            parameter.data.fill_(1)
    patch_model(model, method="svd", energy=0.9)
    return model, images()


def language(name: str) -> tuple[nn.Module, Tensor]:
    """A patched model with ALiBi and six heads; of input and output only tokens."""
    model = make(name)
    patch_model(model, backend="sdpa")
    return model, torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    """One of them by name."""
    made = {"toy": toy, "swin": swin}
    return made[name]() if name in made else language(name)


@torch.no_grad()
def outputs(model: Any, x: Tensor) -> Tensor:
    """What a model makes of its input."""
    out = model(x)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found
