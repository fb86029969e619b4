"""What every process does: serve wrapped and split models, and share out sites."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from flashbias_convert import StaleTermsError, check_model, fit_sites, inspect_model, unpatch_model
from flashbias_convert.calibration import calibrate_model
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.errors import UsageError
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.parallel import ColwiseFused, shard_sites, spread
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.swap import patched_modules
from flashbias_convert.terms import ScoreBias
from tests import pairformer
from tests.toy import TOY, ToyModel, make_input, make_model

from .processes import VISION, got_ocr, model_of, outputs

WRAPPED = ("toy", "swin", "bloom")
SPLIT = ("toy", "swin", "bloom", "mpt", "falcon", "t5", *VISION)
#: those whose layers make q, k and v at once
PACKED = ("toy", "swin", "bloom", "mpt", "falcon", "timm swin", "timm beit", "timm shared beit")
#: the projections of each attention: to the heads, and from them
_TIMM: tuple[tuple[str, ...], type[ParallelStyle], str] = (("qkv",), ColwiseFused, "proj")
_THREE = (("q_proj", "k_proj", "v_proj"), ColwiseParallel, "o_proj")
_PROJECTIONS: dict[str, tuple[tuple[str, ...], type[ParallelStyle], str]] = {
    **dict.fromkeys(("toy", "swin", "timm swin", "timm beit", "timm shared beit"), _TIMM),
    "bloom": (("query_key_value",), ColwiseParallel, "dense"),
    "falcon": (("query_key_value",), ColwiseParallel, "dense"),
    "mpt": (("Wqkv",), ColwiseFused, "out_proj"),
    "t5": (("q", "k", "v"), ColwiseParallel, "o"),
    "Swin": _THREE,
    "Swinv2": (("query", "key", "value"), ColwiseParallel, "dense"),
    **dict.fromkeys(("Beit", "shared Beit"), _THREE),
}
#: below which modules they are, where not below the site itself
_WHERE = {"Swinv2": "attention", "Beit": "attention", "shared Beit": "attention"}


def serve(rank: int, world: int) -> dict[str, Any]:
    """Outputs of every kind of wrapped model, and what went wrong."""
    found: dict[str, Any] = {}
    for name in WRAPPED:
        found[f"ddp {name}"] = _ddp(name)
        found[f"fsdp {name}"] = _fsdp(name, world)
    for name in SPLIT:
        found[f"split {name}"] = _split(name, world)
    found["generated"] = _generated(world)
    found["refusals"] = _refusals(world)
    found["stale"] = _stale_when_wrapped(world)
    return found


def _ddp(name: str) -> list[Tensor]:
    model, x = model_of(name)
    wrapped = DistributedDataParallel(model)
    found = [outputs(wrapped, x), outputs(wrapped, x)]
    wrapped.train()
    wrapped.eval()
    return [*found, outputs(wrapped, x)]


def _fsdp(name: str, world: int) -> list[Tensor]:
    model, x = model_of(name)
    mesh = init_device_mesh("cpu", (world,))
    for module in model.modules():
        if isinstance(module, PatchedAttention):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = [outputs(model, x), outputs(model, x)]
    model.train()
    model.eval()
    return [*found, outputs(model, x)]


def split(
    name: str,
    world: int,
    wrong: type[ParallelStyle] | None = None,
    *,
    terms_first: bool = False,
) -> tuple[nn.Module, Tensor]:
    """A model whose heads are split over all processes.

    Args:
        name: which.
        world: how many processes.
        wrong: the style for its projections to heads; default the right one.
        terms_first: whether the terms are split before the projections.
    """
    model, x = model_of(name)
    mesh = init_device_mesh("cpu", (world,))
    to_heads, style, from_heads = _PROJECTIONS[name]
    style = wrong or style
    if terms_first:
        shard_sites(model, mesh)
    found: list[nn.Module] = list(patched_modules(model))
    if name in _WHERE:
        found = [m for key, m in model.named_modules() if key.rpartition(".")[2] == _WHERE[name]]
    for attention in found:
        for key, module in list(attention.named_modules()):
            leaf = key.rpartition(".")[2]
            if leaf in to_heads:
                parallelize_module(module, mesh, style())
            elif leaf == from_heads:
                parallelize_module(module, mesh, RowwiseParallel())
    if not terms_first:
        assert shard_sites(model, mesh) == len(patched_modules(model))
    return model, x


def _split(name: str, world: int) -> dict[str, Any]:
    model, x = split(name, world)
    copied = copy.deepcopy(model)
    shapes = {
        key: tuple(tensor.shape)
        for site in patched_modules(model)[:1]
        for key, tensor in site.score_bias.named_buffers()
    }
    return {"out": outputs(model, x), "again": outputs(copied, x), "terms": shapes}


@torch.no_grad()
def _generated(world: int) -> dict[str, Tensor]:
    found = {}
    for name in ("bloom", "mpt"):
        model: Any
        model, ids = split(name, world)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        found[name] = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
    return found


def _refusals(world: int) -> dict[str, str]:
    """Messages of what a split model refuses."""
    model, x = split("toy", world)
    mesh = init_device_mesh("cpu", (world,))
    model_of_three, _ = model_of("toy")
    three: Any = patched_modules(model_of_three)[0]
    three.score_bias = ScoreBiasModule(ScoreBias((), 3))
    other, _ = model_of("toy")
    patched_modules(other)[0].head_counts = ()  # type: ignore[misc]
    calls: dict[str, Any] = {
        "recipe": lambda: shard_sites(other, mesh),
        "again": lambda: shard_sites(model, mesh),
        "unpatch": lambda: unpatch_model(model),
        "train": lambda: outputs(model.train(), x),
        "nothing": lambda: shard_sites(make_model(), mesh),
        "three": lambda: shard_sites(model_of_three, mesh),
    }
    for kind in PACKED:
        wrong = ColwiseParallel if _PROJECTIONS[kind][1] is ColwiseFused else ColwiseFused
        calls[f"rows of {kind}"] = partial(split, kind, world, wrong)
        calls[f"rows of {kind}, later"] = partial(_called, kind, world, wrong)
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (UsageError, StaleTermsError) as error:
            found[name] = str(error)
    return found


def _called(name: str, world: int, wrong: type[ParallelStyle]) -> None:
    model, x = split(name, world, wrong, terms_first=True)
    outputs(model, x)


def _stale_when_wrapped(world: int) -> dict[str, str]:
    """Whether other weights are noticed: loaded, trained behind torch's back, or written to."""
    found = {}
    mesh = init_device_mesh("cpu", (world,))
    names = ("fsdp, trained", "fsdp, loaded", "fsdp, loaded with its terms", "fsdp, checked")
    for name in (*names, "fsdp, the same", "ddp, written to"):
        model, x = model_of("toy")
        wrapped: Any
        if name.startswith("ddp"):
            wrapped = DistributedDataParallel(model)
            outputs(wrapped, x)
            patched_modules(model)[0].table.detach()[0, 0, 0] += 1  # type: ignore[operator, index]
        else:
            wrapped = fully_shard(model, mesh=mesh)
            outputs(wrapped, x)
            wrapped.reshard()
        if name == "fsdp, trained":
            wrapped.train()
            parameter: Any = patched_modules(model)[0].table
            with torch.no_grad():
                parameter.to_local().mul_(2)
            wrapped.eval()
        elif name == "fsdp, loaded":
            terms = [key for key in wrapped.state_dict() if ".score_bias." in key]
            state = {k: v for k, v in wrapped.state_dict().items() if k not in terms}
            for key in state:
                if key.endswith("table"):
                    state[key] = state[key] * 2
            wrapped.load_state_dict(state, strict=False)
        elif name in ("fsdp, loaded with its terms", "fsdp, the same"):
            state = dict(wrapped.state_dict())
            if name == "fsdp, loaded with its terms":
                state |= {k: t * 2 for k, t in state.items() if k.endswith("table")}
            wrapped.load_state_dict(state)
        elif name == "fsdp, checked":
            assert check_model(wrapped) == len(patched_modules(model))
            sharded: Any = patched_modules(model)[0].table
            sharded.to_local().detach().mul_(2)
            with suppress(StaleTermsError):
                check_model(wrapped)
        try:
            outputs(wrapped, x)
            found[name] = "served"
        except StaleTermsError:
            found[name] = "refused"
    return found


# -- sites that are shared out -------------------------------------------------------------


def share(rank: int, world: int) -> dict[str, Any]:
    """Plans that were made together, and what happens when a site fails."""
    told: list[tuple[int, int, str]] = []
    plans = {}
    for name, model, options in models():
        plan = inspect_model(
            model, group=dist.group.WORLD, progress=lambda *call: told.append(call), **options
        )
        plans[name] = (plan.to_json(), terms_of(plan))
    plans |= from_inputs(dist.group.WORLD)
    numbers = spread([lambda at=at: at * at for at in range(7)])  # type: ignore[misc]
    return {"plans": plans, "told": told, "failures": _failures(), "numbers": numbers}


def _failures() -> dict[str, str]:
    """What every process raises where one of them fails, by the kind of failure."""
    calls: dict[str, tuple[Any, Any]] = {
        "raises": (_broken, None),
        "cannot be sent": (lambda: lambda: 1, None),
        "raises what cannot be sent": (_broken_with_a_function, None),
        "is told": (lambda: 2, _broken),
    }
    found = {}
    for name, (second, done) in calls.items():
        try:
            spread([lambda: 1, second, lambda: 3], done=done)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _broken(*_: Any) -> int:
    raise ZeroDivisionError("the second one")


def _broken_with_a_function() -> int:
    raise ValueError("it holds", lambda: 1)


def keep(rank: int, world: int) -> dict[str, Any]:
    """Terms of plans that were made together, and those that each process was given to keep."""
    kept: list[ScoreBias] = []

    def put_away(bias: ScoreBias) -> ScoreBias:
        kept.append(bias.to("meta"))
        return kept[-1]

    _, model, options = models()[0]
    plan = inspect_model(model, group=dist.group.WORLD, keep=put_away, **options)
    return {
        "waits": [any(site.bias is bias for bias in kept) for site in plan.patched],
        "kept": len(kept),
    }


def models() -> list[tuple[str, nn.Module, dict[str, Any]]]:
    """Models, not patched, and how to inspect them."""
    toy = ToyModel(5)
    with torch.no_grad():
        for at, parameter in enumerate(toy.parameters()):
            generator = torch.Generator().manual_seed(at)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        toy.blocks[1]["attn"].table.fill_(float("nan"))  # type: ignore[index, union-attr]
    swin, _ = model_of("swin")
    return [
        ("toy", toy, {"recipes": [TOY], "method": "svd", "energy": 0.9}),
        ("swin", swin, {"method": "auto"}),
    ]


def from_inputs(group: Any = None) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """A plan that is calibrated on five batches, and one whose sites are fitted."""
    batches = [make_input(seed) for seed in range(5)]
    calibrated = calibrate_model(
        make_model(), batches, max_output_error=0.1, recipes=[TOY], backend="eager", group=group
    )
    options = FitOptions(
        hidden=16,
        steps=20,
        check_every=10,
        learning_rate=2e-2,
        energy=0.01,
        max_attention_error=1.0,
    )
    fitted = fit_sites(
        pairformer.make_model(), pairformer.make_inputs(tokens=8), rank=4, options=options,
        recipes=pairformer.RECIPES, group=group,
    )  # fmt: skip
    made = {"calibrated": calibrated, "fitted": fitted}
    return {name: (plan.to_json(), terms_of(plan)) for name, plan in made.items()}


def terms_of(plan: Any) -> dict[str, Tensor]:
    """Every tensor of every term, and of the networks that make terms."""
    terms = {
        f"{site.name}.{name}": tensor
        for site in plan.patched
        for name, tensor in site.bias.named_tensors()
    }
    networks = {
        f"{site.name}.{kind}.{name}": tensor
        for site in plan.patched
        for kind, module in (site.modules or {}).items()
        for name, tensor in module.state_dict().items()
    }
    return terms | networks


# -- plans of transformers -----------------------------------------------------------------


def plan_of_transformers(rank: int, world: int) -> dict[str, Any]:
    """Split by transformers as it loads: a BLOOM by a plan of ours, a GOT-OCR 2 by its own."""
    import os
    import tempfile

    from transformers import BloomForCausalLM
    from transformers.distributed import DistributedConfig

    from flashbias_convert import patch_model
    from tests.recipes.alibi.models import make

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    _, ids = model_of("bloom")
    to_heads, from_heads = "query_key_value", "dense"
    site = "transformer.h.*.self_attention"
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        folder = shared[0]
        make("bloom").save_pretrained(folder)  # on the first process only
        dist.barrier()
        ours = {f"{site}.{to_heads}": "colwise", f"{site}.{from_heads}": "rowwise"}
        model: Any = BloomForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_size=world, tp_plan=ours)
        )
        dist.barrier()
        got_ocr(Path(folder, "ocr"))
        dist.barrier()
        ocr: Any
        ocr, inputs = got_ocr(
            Path(folder, "ocr"),
            distributed_config=DistributedConfig(tp_size=world, tp_plan="auto"),
        )
        dist.barrier()
    weight = model.transformer.h[0].self_attention.query_key_value.weight
    patch_model(model.eval(), backend="sdpa")
    mesh = model._device_mesh
    shard_sites(model, mesh["tp"] if mesh.mesh_dim_names else mesh)  # older ones have no names
    text = ocr.model.language_model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        seen = ocr(**inputs).logits
    return {
        "out": outputs(model, ids),
        "rows": weight.to_local().shape[0],
        "seen": seen.full_tensor() if hasattr(seen, "full_tensor") else seen,
        "text rows": text.to_local().shape[0],
    }
