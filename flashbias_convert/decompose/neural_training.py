"""A fit under way: steps, looks at the samples that judge, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .factor_networks import FactorNetworks
from .fit_state import FitState
from .last_layers import solved, solved_at_scales
from .loss import Loss
from .neural_options import PROGRESS, FitLoss, FitOptions
from .neural_samples import Draw, Sample, evaluate, mean_loss, squared_error, squared_size


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


def size_of(samples: Sequence[Sample], loss: FitLoss) -> Tensor:
    return torch.stack([squared_size(s, loss).double() for s in samples]).mean(0)


def positive(x: Tensor) -> Tensor:
    """A head without a bias counts like one of size 1."""
    return torch.where(x > 0, x, torch.ones_like(x))


class Fitting:
    """A fit under way.

    Args:
        draw: makes the sample of a step.
        judges: samples that say how good it is.
        typical: samples that closed forms are made from.
        networks: untrained.
        options: how.
        generator: for `draw`; on the device where the networks are trained.
        data: what `draw` draws from, told from others.
    """

    def __init__(
        self,
        draw: Draw,
        judges: list[Sample],
        typical: list[Sample],
        networks: FactorNetworks,
        options: FitOptions,
        generator: torch.Generator,
        data: tuple[str, ...] = (),
    ) -> None:
        self.draw, self.judges, self.typical, self.data = draw, judges, typical, data
        self.options, self.generator, self.device = options, generator, generator.device
        self.networks = networks.to(self.device)
        self.optimiser = torch.optim.Adam(
            self.networks.parameters(), lr=options.learning_rate, fused=True
        )
        self.size = positive(size_of(judges, options.loss))
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
        """What makes this fit this one: options, sizes, device, the judges and `data`."""
        sums = [float(s.bias.double().sum()) for s in self.judges]
        sums += [float(s.x_q.double().sum()) for s in self.judges]
        return {
            "options": self.options.to_json(),
            "networks": self.networks.config(),
            "device": self.device.type,
            "samples": [repr(value) for value in sums],
            "data": list(self.data),
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
