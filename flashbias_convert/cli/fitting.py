"""The options that say how factor networks are fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from ..decompose.neural import Check
    from ..plan import Plan, SitePlan
    from ..recipe import Recipe

_PANEL = "The fit"


class FitLossName(StrEnum):
    """Values of ``--loss``."""

    centred = "centred"
    raw = "raw"
    attention = "attention"


class ScheduleName(StrEnum):
    """Values of ``--schedule``."""

    cosine = "cosine"
    step = "step"
    constant = "constant"


DataArg = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="Inputs of the model: a folder of images, a text, an .npz or .safetensors of named "
        "inputs, or package.module:function.",
        show_default=False,
    ),
]
SitesOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--sites",
        metavar="NAME",
        help="Only this site: its name, or re:PATTERN for whole names. Repeatable.",
        show_default=False,
    ),
]
SamplesOpt = Annotated[int, typer.Option(help="How many inputs at most.", rich_help_panel=_PANEL)]
BatchOpt = Annotated[int, typer.Option(help="How many at once.", rich_help_panel=_PANEL)]
RankOpt = Annotated[int, typer.Option(help="Of every head.", rich_help_panel=_PANEL)]
FromTokensOpt = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Networks serve calls with at least N tokens, the bias as it is serves shorter ones.",
        rich_help_panel=_PANEL,
        show_default="where networks are faster, as measured on Hopper",
    ),
]
HiddenOpt = Annotated[int, typer.Option(help="Width of a hidden layer.", rich_help_panel=_PANEL)]
StepsOpt = Annotated[int, typer.Option(help="Of the optimiser, at most.", rich_help_panel=_PANEL)]
LossOpt = Annotated[
    FitLossName,
    typer.Option(
        help="Squared error of the bias, rows centred or raw, or of the output of attention.",
        rich_help_panel=_PANEL,
    ),
]
RateOpt = Annotated[float, typer.Option(help="Of Adam, at its highest.", rich_help_panel=_PANEL)]
ScheduleOpt = Annotated[
    ScheduleName,
    typer.Option(
        help="Of the learning rate: falling to zero, 0.95 every 50 steps, or constant.",
        rich_help_panel=_PANEL,
    ),
]
FitEnergyOpt = Annotated[
    float,
    typer.Option(
        help="Share of the squared, row-centred bias that every head must keep on inputs that were "
        "not trained on.",
        rich_help_panel=_PANEL,
    ),
]
FitErrorOpt = Annotated[
    float,
    typer.Option(
        "--max-attention-error",
        help="Largest accepted change of the softmax of a bias (total variation, 0 to 1).",
        rich_help_panel=_PANEL,
    ),
]
PatienceOpt = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Stop after N checks without progress.",
        rich_help_panel=_PANEL,
        show_default="never",
    ),
]
FitSeedOpt = Annotated[int, typer.Option(help="Of everything random.", rich_help_panel=_PANEL)]
StateOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Keeps the fits: an interrupted run that is started again goes on.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Fitting:
    """How to fit.

    Attributes:
        data: see `read_inputs`.
        samples, batch: how many inputs, and how many at once.
        rank: of every head.
        options: fields of `FitOptions`.
        planning: further keyword arguments of `fit_sites`.
        missed: the sites whose fit is not good enough, once the plan is made.
        kept: those whose fit is good enough, and whose bias as it is serves faster.
    """

    data: str
    samples: int
    batch: int
    rank: int
    options: dict[str, Any]
    planning: dict[str, Any]
    missed: list[SitePlan] = field(default_factory=list)
    kept: list[SitePlan] = field(default_factory=list)

    def check(self) -> None:
        """Raise UsageError for values that make no sense; imports nothing heavy."""
        for name, value in (("samples", self.samples), ("batch", self.batch), ("rank", self.rank)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        start = self.planning.get("from_tokens")
        if start is not None and start < 1:
            raise UsageError(f"--from-tokens must be at least 1, got {start}")
        if ":" not in self.data and not Path(self.data).exists():
            raise UsageError(f"there are no inputs {self.data}", "see --help for what there is")

    def planner(self, recipes: Sequence[Recipe], progress: Any) -> Callable[[nn.Module], Plan]:
        """The function that plans an opened model."""

        def plan(model: nn.Module) -> Plan:
            from ..decompose.neural_options import FitOptions
            from ..fitting.sites import fit_sites, kept, missed
            from ..inputs import read_inputs

            options = FitOptions(**self.options)

            def advance(name: str, check: Check) -> None:
                if progress is not None:
                    progress(check.step, options.steps, name)

            found = fit_sites(
                model.eval(),
                read_inputs(model, self.data, samples=self.samples, batch=self.batch),
                rank=self.rank,
                options=options,
                recipes=tuple(recipes),
                progress=advance,
                **self.planning,
            )
            self.missed.extend(missed(found))
            self.kept.extend(kept(found))
            return found

        return plan
