"""Neural decomposition: factor networks fitted to a bias (FlashBias, section 3.2, equation 5).

The paper fits the bias itself. Here its rows are centred, since softmax ignores a constant per row,
and what was lost is measured on samples that were not trained on, in the terms of `Loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .factor_networks import FactorNetworks
from .fit_state import FitState, read_state, write_state
from .last_layers import solved, solved_at_scales
from .loss import Loss
from .neural_options import PROGRESS, FitLoss, FitOptions
from .neural_samples import Draw, Sample, evaluate, mean_loss, squared_error, squared_size

#: How many drawn samples judge a fit, and how many say how large features and biases are.
EVALUATION, STATISTICS = 2, 8
#: Most tokens of a sample that is made of several.
LARGEST = 2048


@dataclass(frozen=True)
class Check:
    """A look at the evaluation samples.

    Attributes:
        step: how many steps were done.
        rate: the learning rate of the last one.
        trained: the loss of the last step, relative to the size of what is approximated.
        evaluated: the same on the evaluation samples, with the last layers as they are or in
            closed form, whichever is better.
        energy: of the worst head and sample, see `Loss`.
        attention_error: likewise.
    """

    step: int
    rate: float
    trained: float
    evaluated: float
    energy: float
    attention_error: float


@dataclass(frozen=True, eq=False)
class FitResult:
    """Factor networks, and what they lose.

    Attributes:
        networks: those of the best check, on the device of the fit.
        history: every check, in order.
        loss: on the evaluation samples, the worst one of each head, shapes (H,); energy, logit
            errors and attention error.
        reached: whether every head keeps what was asked for.
        reason: why the fit ended, and what it misses.
        steps: how many were done.
    """

    networks: FactorNetworks = field(repr=False)
    history: tuple[Check, ...]
    loss: Loss
    reached: bool
    reason: str
    steps: int


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
    progress: Progress | None = None,
) -> FitResult:
    """Fit factor networks to samples; see `fit_factor_networks`.

    Args:
        draw: makes the sample of a step.
        evaluation: samples that judge; none means that `draw` makes them, of a seed of their own.
        typical: samples that say how large features and biases are, and which closed forms are
            made from; none means that `draw` makes them.
    """
    device = torch.device(device)
    judges = list(evaluation) or _drawn(draw, EVALUATION, _seed(options.seed, 1), device)
    judges = [sample.to(device) for sample in judges]
    known = list(typical) or _drawn(draw, STATISTICS, _seed(options.seed, 3), device)
    known = [sample.to(device) for sample in known]
    for sample in (*judges, *known):
        sample.check(heads)
    networks = _networks(known, rank, heads, options)
    fitting = _Fitting(draw, judges, known, networks, options, device)
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
    networks.gain.copy_(_positive(_size(typical, loss).sqrt()).cpu())
    return networks


def _size(samples: Sequence[Sample], loss: FitLoss) -> Tensor:
    return torch.stack([squared_size(s, loss).double() for s in samples]).mean(0)


def _positive(x: Tensor) -> Tensor:
    """A head without a bias counts like one of size 1."""
    return torch.where(x > 0, x, torch.ones_like(x))


class _Fitting:
    """A fit under way."""

    def __init__(
        self,
        draw: Draw,
        judges: list[Sample],
        typical: list[Sample],
        networks: FactorNetworks,
        options: FitOptions,
        device: torch.device,
    ) -> None:
        self.draw, self.judges, self.typical = draw, judges, typical
        self.options, self.device = options, device
        self.networks = networks.to(device)
        self.optimiser = torch.optim.Adam(
            self.networks.parameters(), lr=options.learning_rate, fused=True
        )
        self.generator = torch.Generator(device).manual_seed(_seed(options.seed, 2))
        self.size = _positive(_size(judges, options.loss))
        self.history: list[Check] = []
        self.best: dict[str, Tensor] = self._weights()
        self.best_loss, self.idle = math.inf, 0
        #: whether the best weights keep what was asked for; those that do come first
        self.best_holds = False
        self.ended: str | None = None

    # -- closed forms ----------------------------------------------------------------------

    def _begin(self) -> None:
        """Look at the weights of now, and at closed forms. Training starts from the former.

        A closed form is no good start: its large weights cancel each other, which training undoes.
        """
        now = self._weights()
        found = [now]
        if self.options.closed_form:
            found += solved_at_scales(self.networks, self.typical, centred=self._centred)
        self._look(0, 0.0, self._loss(now), found)
        self.networks.load_state_dict(now)

    def _candidates(self) -> list[dict[str, Tensor]]:
        """The weights of now, and the same with the best last layers."""
        now = self._weights()
        if not self.options.closed_form:
            return [now]
        last = solved(self.networks, self.typical, centred=self._centred)
        return [now, *({**now, **weights} for weights in last)]

    @property
    def _centred(self) -> bool:
        return self.options.loss != "raw"

    def _loss(self, weights: dict[str, Tensor]) -> float:
        """Of the networks with these weights, which they keep; infinite rather than NaN."""
        self.networks.load_state_dict(weights)
        loss = mean_loss(self.networks, self.judges, self.options.loss, self.size)
        return loss if math.isfinite(loss) else math.inf

    # -- steps -----------------------------------------------------------------------------

    def advance(self) -> None:
        """Begin, or train up to the next check; and look."""
        if not self.history:
            return self._begin()
        start = self.history[-1].step
        end = min(start + self.options.check_every, self.options.steps)
        trained = torch.zeros(())
        rate = 0.0
        with torch.enable_grad():
            for step in range(start, end):
                rate = self.options.rate(step)
                trained = self._step(rate)
        now = self._weights()
        self._look(end, rate, float(trained), self._candidates())
        self.networks.load_state_dict(now)

    def _step(self, rate: float) -> Tensor:
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        sample = self.draw(self.generator).to(self.device)
        errors = squared_error(self.networks, sample, self.options.loss)
        loss = (errors / self.size.to(errors)).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def _look(
        self, step: int, rate: float, trained: float, candidates: Sequence[dict[str, Tensor]]
    ) -> None:
        """Note what the best of some weights lose, and whether to go on."""
        losses = [self._loss(weights) for weights in candidates]
        evaluated = min(losses)
        weights = candidates[losses.index(evaluated)]
        self.networks.load_state_dict(weights)
        finite = math.isfinite(trained) and math.isfinite(evaluated)
        lost = evaluate(self.networks, self.judges) if finite else None
        energy = 0.0 if lost is None else float(lost.energy.min())
        attention = 1.0 if lost is None else float(lost.attention_error.max())
        self.history.append(Check(step, rate, trained, evaluated, energy, attention))
        if not finite:
            self.ended = "the loss is no longer finite: is the learning rate too high?"
            return
        holds = not self._misses(lost)
        self.idle = 0 if evaluated < self.best_loss * (1 - PROGRESS) else self.idle + 1
        if (not holds, evaluated) < (not self.best_holds, self.best_loss):
            self.best_holds, self.best_loss, self.best = holds, evaluated, weights
        self.ended = self._end(step, holds)

    def _end(self, step: int, holds: bool) -> str | None:
        if self.options.early_stop and self._asks() and holds:
            return f"reached after {step} steps"
        if step >= self.options.steps:
            return f"all {step} steps are done"
        if self.options.patience is not None and self.idle >= self.options.patience:
            return f"no progress in {self.idle} checks, after {step} steps"
        return None

    def _asks(self) -> bool:
        return self.options.energy is not None or self.options.max_attention_error is not None

    def _misses(self, lost: Loss | None) -> list[str]:
        """What is asked for and not kept, in words."""
        if lost is None:
            return ["nothing was learned"]
        found = []
        energy, error = float(lost.energy.min()), float(lost.attention_error.max())
        if self.options.energy is not None and energy < self.options.energy:
            found.append(f"energy {energy:.4%} instead of {self.options.energy:.4%}")
        most = self.options.max_attention_error
        if most is not None and error > most:
            found.append(f"attention error {error:.3g} instead of {most:.3g}")
        return found

    def _weights(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in self.networks.state_dict().items()}

    # -- the end ---------------------------------------------------------------------------

    def result(self) -> FitResult:
        """The best networks."""
        assert self.ended is not None
        self.networks.load_state_dict(self.best)
        lost = evaluate(self.networks, self.judges)
        misses = self._misses(lost)
        self.networks.requires_grad_(False)
        self.networks.eval()
        return FitResult(
            networks=self.networks,
            history=tuple(self.history),
            loss=lost,
            reached=not misses,
            reason="; ".join([self.ended, *misses]),
            steps=self.history[-1].step,
        )

    # -- interruptions ---------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What makes this fit this one: options, sizes, device and the samples that judge."""
        sums = [float(s.bias.double().sum()) for s in self.judges]
        sums += [float(s.x_q.double().sum()) for s in self.judges]
        return {
            "options": self.options.to_json(),
            "networks": self.networks.config(),
            "device": self.device.type,
            "samples": [repr(value) for value in sums],
        }

    def state(self) -> FitState:
        """Everything that a later process needs to go on."""
        return FitState(
            weights=self._weights(),
            optimiser=self.optimiser.state_dict(),
            generator=self.generator.get_state(),
            best=self.best,
            best_loss=self.best_loss,
            best_holds=self.best_holds,
            idle=self.idle,
            ended=self.ended,
            history=[vars(check) for check in self.history],
        )

    def resume(self, state: FitState) -> None:
        """Go on from a state."""
        self.networks.load_state_dict(state.weights)
        self.optimiser.load_state_dict(state.optimiser)
        self.generator.set_state(state.generator)
        self.best, self.best_loss, self.best_holds = state.best, state.best_loss, state.best_holds
        self.idle = state.idle
        self.ended = state.ended
        self.history = [Check(**check) for check in state.history]
