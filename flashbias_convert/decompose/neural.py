"""Neural decomposition: factor networks fitted to a bias (FlashBias, section 3.2, equation 5).

The paper fits the bias itself. Here its rows are centred, since softmax ignores a constant per row,
and what was lost is measured on samples that were not trained on, in the terms of `Loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .factor_networks import FactorNetworks
from .fit_state import read_state, write_state
from .neural_options import FitLoss, FitOptions
from .neural_samples import Draw, Sample
from .neural_training import Check, FitResult, Fitting, positive, size_of

__all__ = ["Check", "FitResult", "fit", "fit_factor_networks"]

#: How many drawn samples judge a fit, and how many say how large features and biases are.
EVALUATION, STATISTICS = 2, 8
#: Most tokens of a sample that is made of several.
LARGEST = 2048

Progress = Callable[[Check], None]


def fit_factor_networks(
    bias_fn: Callable[[Tensor, Tensor], Tensor],
    sample_tokens: Callable[[torch.Generator], Tensor | tuple[Tensor, Tensor]],
    *,
    rank: int,
    heads: int,
    options: FitOptions | None = None,
    device: torch.device | str = "cpu",
    state: str | Path | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> FitResult:
    """Fit factor networks to a bias that is a function of the features of its tokens.

    Args:
        bias_fn: (x_q, x_k) -> bias, shapes (*batch, N, C), (*batch, M, C) -> (*batch, H, N, M);
            without masks.
        sample_tokens: draws features, floating point, on any device: x for both, or (x_q, x_k).
            Everything random must come from the generator that it is given, which is on `device`.
        rank: R, for every head.
        heads: H.
        options: how; the defaults of `FitOptions`.
        device: where to train. Equal seeds give equal bits on equal devices.
        state: a file that keeps the fit after every check; a fit that finds it goes on from there
            and ends with the same bits as one that was never interrupted.
        progress: called after every check; the first one comes before the first step.
        **changes: fields of `FitOptions` to replace.

    Raises:
        UsageError: options or shapes that make no sense, or a state of another fit.
        DecompositionError: NaN or infinity in a sample.
        CheckpointError: a state that cannot be read.
    """

    def draw(generator: torch.Generator) -> Sample:
        drawn = sample_tokens(generator)
        x_q, x_k = drawn if isinstance(drawn, tuple) else (drawn, drawn)
        return Sample(x_q, x_k, bias_fn(x_q, x_k))

    chosen = replace(options or FitOptions(), **changes)
    generator = torch.Generator(device).manual_seed(_seed(chosen.seed, 3))
    return fit(
        draw, rank=rank, heads=heads, options=chosen, typical=(_union(draw, bias_fn, generator),),
        device=device, state=state, progress=progress,
    )  # fmt: skip


def _union(
    draw: Draw, bias_fn: Callable[[Tensor, Tensor], Tensor], generator: torch.Generator
) -> Sample:
    """The tokens of several samples as one, since the bias is a function of any two tokens."""
    drawn = [draw(generator) for _ in range(STATISTICS)]
    x_q = torch.cat([sample.x_q.flatten(0, -2) for sample in drawn])[:LARGEST]
    x_k = torch.cat([sample.x_k.flatten(0, -2) for sample in drawn])[:LARGEST]
    return Sample(x_q, x_k, bias_fn(x_q, x_k))


def fit(
    draw: Draw,
    *,
    rank: int,
    heads: int,
    options: FitOptions,
    evaluation: Sequence[Sample] = (),
    typical: Sequence[Sample] = (),
    device: torch.device | str = "cpu",
    state: str | Path | None = None,
    data: Sequence[str] = (),
    progress: Progress | None = None,
) -> FitResult:
    """Fit factor networks to samples; see `fit_factor_networks`.

    Args:
        draw: makes the sample of a step.
        evaluation: samples that judge; none means that `draw` makes them, of a seed of their own.
        typical: samples that say how large features and biases are, and which closed forms are
            made from; none means that `draw` makes them.
        data: what `draw` draws from, told from others: a state is that of these alone.
    """
    device = torch.device(device)
    judges = list(evaluation) or _drawn(draw, EVALUATION, _seed(options.seed, 1), device)
    judges = [sample.to(device) for sample in judges]
    known = list(typical) or _drawn(draw, STATISTICS, _seed(options.seed, 3), device)
    known = [sample.to(device) for sample in known]
    for sample in (*judges, *known):
        sample.check(heads)
    networks = _networks(known, rank, heads, options)
    generator = torch.Generator(device).manual_seed(_seed(options.seed, 2))
    fitting = Fitting(draw, judges, known, networks, options, generator, tuple(data))
    found = None if state is None else read_state(state, fitting.identity())
    if found is not None:
        fitting.resume(found)
    while fitting.ended is None:
        fitting.advance()
        if state is not None:
            write_state(state, fitting.identity(), fitting.state())
        if progress is not None:
            progress(fitting.history[-1])
    return fitting.result()


def _drawn(draw: Draw, count: int, seed: int, device: torch.device) -> list[Sample]:
    generator = torch.Generator(device).manual_seed(seed)
    return [draw(generator).to(device) for _ in range(count)]


def _seed(seed: int, purpose: int) -> int:
    """Distinct for every pair; seeds that are near each other share no numbers."""
    return (seed * 4 + purpose) % 2**63


def _networks(
    typical: Sequence[Sample], rank: int, heads: int, options: FitOptions
) -> FactorNetworks:
    """Untrained networks that know how large features and biases are."""
    x_q = torch.cat([sample.x_q.flatten(0, -2) for sample in typical]).cpu()
    x_k = torch.cat([sample.x_k.flatten(0, -2) for sample in typical]).cpu()
    try:
        networks = FactorNetworks(x_q.shape[-1], x_k.shape[-1], heads, rank, options.hidden)
    except ValueError as error:
        raise UsageError(str(error)) from error
    networks.initialise(torch.Generator().manual_seed(_seed(options.seed, 0)))
    networks.phi_q.standardise(x_q)
    networks.phi_k.standardise(x_k)
    loss: FitLoss = "raw" if options.loss == "raw" else "centred"
    networks.gain.copy_(positive(size_of(typical, loss).sqrt()).cpu())
    return networks
