"""A few steps of training on one device and on two: the same losses, and the same new weights."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .measuring import held, judged, megabytes, peak, timed, times
from .serving import make, settle, wrap
from .working import WORLD, barrier, stage

STEPS = 4
#: of plain gradient descent, for images and for text: larger ones do not lower the loss
RATES = {True: 0.001, False: 0.05}


def trained(case: str, options: argparse.Namespace, place: torch.device, rank: int) -> Any:
    """All of a batch on this process's device alone, then a half of it on each.

    Weights are fp32; bf16 is autocast. Both are compared with steps in float64.
    """
    way, name, dtype = case.split()
    half = getattr(torch, dtype)
    model, x = prepared(name, options.size, place)
    stage("steps in float64")
    truth = steps(copy.deepcopy(model).double(), _cast(x, torch.float64, place), None)
    x = _cast(x, torch.float32, place)
    alone = copy.deepcopy(model)
    stage("steps on one device")
    one = steps(alone, x, half)
    barrier(place)
    step = _stepping(alone, x, half)
    seconds_one = timed(step, options.repeats, place)
    peak_one, held_one = peak(step, place), held(alone)
    del alone, step
    wrapped = wrap(way.removeprefix("train-"), model, place)
    own = x.chunk(WORLD)[rank]
    stage("steps on two")
    two = steps(wrapped, own, half)
    for loss in two[0]:  # each has the mean of its half
        dist.all_reduce(loss)
        loss /= WORLD
    step = _stepping(wrapped, own, half)
    seconds_two = timed(step, options.repeats, place, lambda: barrier(place))
    settle(wrapped)
    peak_two = peak(step, place)
    settle(wrapped)
    found = judged(two[1], one[1], truth[1])
    if problem := losses_problem(two[0], one[0], truth[0], x):
        found |= {"status": "failed", "reason": problem}
    found |= times(seconds_one, seconds_two, len(x))
    found |= megabytes("held_mb_one", held_one) | megabytes("held_mb_two", held(wrapped))
    return found | megabytes("peak_mb_one", peak_one) | megabytes("peak_mb_two", peak_two)


def losses_problem(two: list[Tensor], one: list[Tensor], truth: list[Tensor], x: Tensor) -> str:
    """Nothing, or what is wrong with the losses of two.

    Each may be twice as far off as that of one. Sums of both come in another order: a rounding for
    every level of a tree of sums.
    """
    for i, (a, b, exact) in enumerate(zip(two, one, truth, strict=True)):
        unit = torch.finfo(torch.float32).eps * math.log2(x.numel()) * float(exact.abs())
        if not float((a - exact).abs()) <= 2 * float((b - exact).abs()) + unit:
            return f"the loss of step {i + 1} is {float(a):.6f}, not {float(b):.6f} as on one"
    if len(truth) > 1 and not float(truth[-1]) < float(truth[0]):
        return f"nothing was learnt: losses {[round(float(x), 4) for x in truth]}"
    return ""


def prepared(name: str, size: str, place: torch.device) -> tuple[nn.Module, Tensor]:
    """A model whose terms are trained with all else, and inputs: a half of those that are served.

    Steps in float64 keep everything for the backward pass.
    """
    from flashbias_convert import patch_model

    model, x = make(name, size)
    model, x = model.to(place), x[: len(x) // 2]
    for module in model.modules():
        if hasattr(module, "drop_prob"):  # random depth would differ between processes
            module.drop_prob = 0.0
    method = {"method": "svd", "energy": 0.9} if name == "swin" else {"method": "auto"}
    patch_model(model, train="terms", force_all=True, **method)
    return model.train(), x


def steps(model: nn.Module, x: Tensor, half: torch.dtype | None) -> tuple[list[Tensor], Tensor]:
    """The loss of each step in float64, and how far all trained weights have moved together."""
    before = {n: _whole(p).clone() for n, p in _weights(model).items()}
    losses: list[Tensor] = []
    step = _stepping(model, x, half, losses)
    for _ in range(STEPS):
        step()
    moved = [(_whole(p) - before[n]).flatten() for n, p in _weights(model).items()]
    return [loss.double() for loss in losses], torch.cat(moved)


def _stepping(
    model: nn.Module, x: Tensor, half: torch.dtype | None, losses: list[Tensor] | None = None
) -> Callable[[], None]:
    """A step of plain gradient descent, which has no state to differ in."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=RATES[x.is_floating_point()])
    lower = half is not None and half != torch.float32

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, half if lower else None, enabled=lower):
            loss = loss_of(model(x), x)
        loss.backward()
        optimizer.step()
        if losses is not None:
            losses.append(loss.detach())

    return step


def loss_of(out: Any, x: Tensor) -> Tensor:
    """Of the next token; of images, of a class that an image's own numbers choose."""
    if isinstance(out, Tensor):
        labels = (x.double().flatten(1).sum(1).abs() * 1000).long() % out.shape[-1]
        return F.cross_entropy(_wide(out), labels)
    logits = out.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(_wide(logits), x[:, 1:].flatten())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, by its name without those of wrappers."""
    named = {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}
    return dict(sorted(named.items()))


def _whole(p: Any) -> Tensor:
    """All of a parameter, on every process."""
    found: Tensor = p.detach()
    return p.full_tensor().detach() if hasattr(p, "full_tensor") else found


def _cast(x: Tensor, dtype: torch.dtype, place: torch.device) -> Tensor:
    return x.to(place, dtype) if x.is_floating_point() else x.to(place)
