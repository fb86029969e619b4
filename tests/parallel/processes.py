"""Functions that run on several processes at once, over gloo, and what they need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from flashbias_convert import patch_model
from tests.checkpoint.models import ARGS, NAME, images
from tests.recipes.alibi.models import make
from tests.toy import TOY, make_input, make_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from two_gpus import got_ocr as ocr

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


#: of timm and of transformers: what makes them, with two heads in every layer
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "timm swin": (
        "swin_tiny_patch4_window7_224",
        {"patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2]},
    ),
    "timm beit": (
        "beit_base_patch16_224",
        {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
    ),
    "timm shared beit": (
        "beit_base_patch16_224",
        {
            "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2,
            "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True,
        },
    ),
    "Swin": ("Swin", {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}),
    "Swinv2": (
        "Swinv2", {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
    ),
    "Beit": ("Beit", {"use_relative_position_bias": True}),
    "shared Beit": ("Beit", {"use_shared_relative_position_bias": True}),
}  # fmt: skip


def vision(name: str) -> tuple[nn.Module, Tensor]:
    """A patched model of images, whose biases matter."""
    import timm
    import transformers

    kind, sizes = VISION[name]
    torch.manual_seed(0)
    model: Any
    if name.startswith("timm"):
        model = timm.create_model(kind, img_size=32, num_classes=5, **sizes)
    else:
        if kind == "Beit":
            sizes = {
                **sizes, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2,
                "num_attention_heads": 2, "intermediate_size": 32,
            }  # fmt: skip
        else:
            sizes = {**sizes, "patch_size": 2}
        config = getattr(transformers, f"{kind}Config")(image_size=32, **sizes)
        model = getattr(transformers, f"{kind}Model")(config)
    for key, parameter in model.named_parameters():
        if "position" in key or "rel_pos" in key or key == "head.weight":
            parameter.data.normal_()
        elif "gamma" in key or "lambda" in key:  # else blocks would do nothing
            parameter.data.fill_(1)
    patch_model(model.eval(), method="svd", energy=0.9, force_all=True)
    return model, images()


def t5() -> tuple[nn.Module, Tensor]:
    """A patched T5 with two heads; its input serves the encoder and the decoder."""
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    for key, parameter in model.named_parameters():
        if "relative_attention_bias" in key:
            parameter.data.normal_()
    patch_model(model, backend="sdpa")
    return model, torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))


def got_ocr(path: Path | None = None, **loading: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A GOT-OCR 2, whose vision has biased attention and whose text has a plan, and its inputs.

    Args:
        path: where to save it, or to load it from if there is something to load it with.
        **loading: for `from_pretrained`.
    """
    import transformers

    if loading:
        made: Any = transformers.GotOcr2ForConditionalGeneration
        model = made.from_pretrained(path, **loading)
    else:
        model = ocr.make()
        if path is not None:
            model.save_pretrained(path)
    patch_model(model.eval(), force_all=True)
    return model, {"input_ids": ocr.text(), "pixel_values": images()[:1]}


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    """One of them by name."""
    made = {"toy": toy, "swin": swin, "t5": t5}
    if name in VISION:
        return vision(name)
    return made[name]() if name in made else language(name)


@torch.no_grad()
def outputs(model: Any, x: Tensor) -> Tensor:
    """What a model makes of its input."""
    decoder = {} if x.is_floating_point() or not encodes(model) else {"decoder_input_ids": x}
    out = model(x, **decoder)
    if isinstance(out, Tensor):
        return out
    found: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return found


def encodes(model: Any) -> bool:
    """Whether a language model has an encoder beside its decoder."""
    config = getattr(getattr(model, "module", model), "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))
