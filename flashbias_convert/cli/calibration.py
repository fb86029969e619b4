"""The options that choose ranks by their effect on real inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from ..plan import Plan
    from ..recipe import Recipe

_PANEL = "Calibration"
SAMPLES = 32
LIMIT = 0.01

CalibrationOpt = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Choose ranks by their effect on these inputs: a folder of images, a text, an .npz or "
        ".safetensors, package.module:function, or random.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
CalibrationSamplesOpt = Annotated[
    int | None,
    typer.Option(metavar="N", help=f"How many inputs ({SAMPLES}).", rich_help_panel=_PANEL),
]
MaxOutputErrorOpt = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help=f"Largest relative change of the outputs on these inputs ({LIMIT}).",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class Calibrating:
    """How to calibrate.

    Attributes:
        inputs: see `read_inputs`.
        samples: how many.
        limit: see `calibrate_model`.
        options: keyword arguments of `calibrate_model`.
    """

    inputs: str
    samples: int
    limit: float
    options: dict[str, Any]

    def planner(self, recipes: Sequence[Recipe], progress: Any) -> Callable[[nn.Module], Plan]:
        """The function that plans an opened model."""

        def plan(model: nn.Module) -> Plan:
            from ..calibration import calibrate_model
            from ..inputs import read_inputs

            tokens = self.options.get("tokens")
            given = read_inputs(model, self.inputs, samples=self.samples, tokens=tokens)
            return calibrate_model(
                model,
                given,
                max_output_error=self.limit,
                recipes=tuple(recipes),
                progress=progress,
                **self.options,
            )

        return plan


def calibrating(
    inputs: str | None, samples: int | None, limit: float | None, options: dict[str, Any]
) -> Calibrating | None:
    """What the options ask for; None without --calibration.

    Raises:
        UsageError: an option that needs --calibration, or a value that makes no sense.
    """
    if inputs is None:
        given = {"--calibration-samples": samples, "--max-output-error": limit}
        for option, value in given.items():
            if value is not None:
                raise UsageError(f"{option} says how to calibrate", "add --calibration")
        return None
    limit = LIMIT if limit is None else limit
    if math.isnan(limit) or not 0.0 < limit <= 1.0:
        raise UsageError(f"max_output_error must be in (0, 1], got {limit}")
    samples = SAMPLES if samples is None else samples
    if samples < 1:
        raise UsageError(f"calibration samples must be at least 1, got {samples}")
    return Calibrating(inputs, samples, limit, options)
