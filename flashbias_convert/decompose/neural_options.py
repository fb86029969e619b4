"""How factor networks are fitted: sizes, loss, learning rate, and when to stop."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import UsageError

FitLoss = Literal["centred", "raw", "attention"]
Schedule = Literal["cosine", "step", "constant"]

#: The paper multiplies its learning rate by this every so many steps. After 10,000 steps that is
#: a factor of 3.5e-5: little is learned after the first 3,000.
STEP_FACTOR, STEP_LENGTH = 0.95, 50
#: A check counts as progress if it lowers the loss by this, relatively.
PROGRESS = 1e-3


@dataclass(frozen=True)
class FitOptions:
    """How factor networks are fitted.

    Attributes:
        hidden: width of the two hidden layers; 256 in the paper.
        steps: of the optimiser, at most; 10,000 in the paper.
        loss: "centred" is the squared error after row-centring, relative to the squared bias;
            "raw" the same without centring (the paper, equation 5); "attention" the squared error
            of what attention puts out, with the samples' q, k and v, or, where they have none, of
            the softmax of the bias itself.
        learning_rate: of Adam, at its highest.
        schedule: "cosine" falls to zero over all steps, "step" is the paper's (0.95 every 50
            steps), "constant" stays.
        closed_form: at every look also try the best last layers for the hidden ones, see
            `last_layers`; training goes on from what it had. False trains alone, as the paper does.
        energy: share of the squared, row-centred bias that every head must keep on every sample
            of the evaluation, in (0, 1]; None asks for nothing.
        max_attention_error: largest accepted total variation distance between the softmax of the
            bias and of its approximation, mean over rows; None asks for nothing.
        early_stop: stop when what is asked is reached.
        patience: stop after so many checks without progress; None never does.
        check_every: steps between two looks at the evaluation samples.
        seed: of the weights and of everything that is drawn.

    Raises:
        UsageError: a value that makes no sense.
    """

    hidden: int = 256
    steps: int = 10_000
    loss: FitLoss = "centred"
    learning_rate: float = 1e-3
    schedule: Schedule = "cosine"
    closed_form: bool = True
    energy: float | None = 0.99
    max_attention_error: float | None = 0.25
    early_stop: bool = True
    patience: int | None = None
    check_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "steps", "check_every", "patience"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be a positive integer, got {value!r}")
        for name, known in (("loss", get_args(FitLoss)), ("schedule", get_args(Schedule))):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if not 0.0 < self.learning_rate < math.inf:
            raise UsageError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.energy is not None and not 0.0 < self.energy <= 1.0:
            raise UsageError(f"energy must be in (0, 1], got {self.energy}")
        error = self.max_attention_error
        if error is not None and not 0.0 <= error <= 1.0:
            raise UsageError(f"max_attention_error must be in [0, 1], got {error}")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if self.schedule == "step":
            return self.learning_rate * STEP_FACTOR ** (step // STEP_LENGTH)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)
