"""Work before a model serves, on one process and shared out over two: the same bits."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .measuring import timed, times
from .pairs import RECIPE, PairModel, pair_inputs
from .serving import make
from .working import barrier

Plan = Any


def shared_out(case: str, options: argparse.Namespace, place: torch.device, _: int) -> Any:
    """A job on this process alone, and with the other one."""
    jobs = {"svd": svd, "calibrate": calibrate, "fit": fitting, "structures": structures}
    way = case.split()[0]
    job, count = jobs[way](options.size == "small", place)
    alone, shared = job(None), job(dist.group.WORLD)  # libraries are loaded meanwhile, too
    repeats = max(1, options.repeats // 20)

    def meet() -> None:
        barrier(place)

    # alone, too, both work at the same time: neither has the machine for itself
    seconds_one = timed(partial(job, None), repeats, place, meet, warm=0)
    seconds_two = timed(partial(job, dist.group.WORLD), repeats, place, meet, warm=0)
    reason = difference(alone, shared)
    found = {"status": "failed" if reason else "passed", "reason": reason}
    return found | {"same_bits": not reason} | times(seconds_one, seconds_two, count)


def difference(alone: dict[str, Any], shared: dict[str, Any]) -> str:
    """What is not the same bits in two results; nothing if all is."""
    if alone.keys() != shared.keys() or not any(isinstance(v, Tensor) for v in alone.values()):
        return "the results have other parts"
    for name, value in alone.items():
        other = shared[name]
        if isinstance(value, Tensor) and value.device != other.device:
            return f"{name} is on {other.device}, not on {value.device}"
        same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
        if not same:
            return f"{name} differs"
    return ""


def parts_of(plan: Plan) -> dict[str, Any]:
    """Decisions and tensors of a plan."""
    found: dict[str, Any] = {"plan": plan.to_json()}
    for site in plan.patched:
        found |= {f"{site.name}.{name}": tensor for name, tensor in site.bias.named_tensors()}
        for kind, module in (site.modules or {}).items():
            state = module.state_dict()
            found |= {f"{site.name}.{kind}.{name}": tensor for name, tensor in state.items()}
    return found


# -- jobs: a function of the group, and how many things it shares out ----------------------


def svd(small: bool, place: torch.device) -> tuple[Any, int]:
    """SVDs of all sites of a SwinV2."""
    from flashbias_convert import inspect_model

    model, _ = make("swin", "small" if small else "tiny")
    model.to(place)

    def job(group: Any) -> dict[str, Any]:
        return parts_of(inspect_model(model, method="svd", energy=0.9, force_all=True, group=group))

    return job, len(inspect_model(model, method="exact", force_all=True).patched)


def calibrate(small: bool, place: torch.device) -> tuple[Any, int]:
    """Ranks of a SwinV2, by what they do to its outputs."""
    from flashbias_convert import inspect_model
    from flashbias_convert.calibration import calibrate_model

    # half of the stages: each choice of ranks has kernels of its own to be compiled, and how well
    # it chooses is not the question. Images are as many as a calibration has, so that their runs,
    # which are shared out, take longer than what each process does for itself
    model, x = make("swin", "small" if small else "tiny", stages=2)
    images = x.repeat(3, 1, 1, 1) if small else x[:8]
    model, batches = model.to(place), list(images.to(place).split(4 if small else 1))

    def job(group: Any) -> dict[str, Any]:
        plan = calibrate_model(model, batches, max_output_error=0.02, group=group)
        return parts_of(plan)

    return job, len(inspect_model(model, method="exact", force_all=True).patched)


def fitting(small: bool, place: torch.device) -> tuple[Any, int]:
    """Factor networks of eight layers with pair biases."""
    from flashbias_convert import fit_sites
    from flashbias_convert.decompose.neural_options import FitOptions

    model = PairModel(8 if small else 4).to(place).eval()
    inputs = {k: t.to(place) for k, t in pair_inputs(256 if small else 12).items()}
    steps = 200 if small else 10
    # no fit reaches that: all take the same steps, and what they reach is not the question
    options = FitOptions(
        hidden=256 if small else 8, steps=steps, check_every=steps // 2,
        energy=0.999999, max_attention_error=1.0,
    )  # fmt: skip

    def job(group: Any) -> dict[str, Any]:
        plan = fit_sites(
            model, inputs, rank=32 if small else 4, options=options, recipes=[RECIPE], group=group
        )
        numbers = [d.to_json() for site in plan.sites for d in site.decisions]
        return parts_of(plan) | {"losses": torch.tensor([n["energy"] for n in numbers])}

    return job, len(model.layers)


def structures(small: bool, place: torch.device) -> tuple[Any, int]:
    """Factors of the pair biases of many structures, by `spread`."""
    from flashbias_convert.decompose.svd import truncated_svd
    from flashbias_convert.parallel import spread

    count, n = (16, 512) if small else (4, 24)

    def factors(at: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(at)
        ends = torch.randn(2, 4, n, 12, generator=generator)
        noise = torch.randn(4, n, n, generator=generator)
        bias = (ends[0] @ ends[1].mT + 0.1 * noise).to(place)
        term = truncated_svd(bias, energy=0.99).term
        return term.phi_q.cpu(), term.phi_k.cpu()

    def job(group: Any) -> dict[str, Any]:
        work = [partial(factors, at) for at in range(count)]
        found = [call() for call in work] if group is None else spread(work, group)
        return {f"{at}.{i}": t for at, pair in enumerate(found) for i, t in enumerate(pair)}

    return job, count
