"""``flashbias-convert fit``: factor networks for biases that depend on the input."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..errors import FitError, NothingToConvertError
from .conversion import Request, run_conversion
from .fitting import (
    BatchOpt,
    DataArg,
    FitEnergyOpt,
    FitErrorOpt,
    FitLossName,
    FitSeedOpt,
    Fitting,
    FromTokensOpt,
    HiddenOpt,
    LossOpt,
    PatienceOpt,
    RankOpt,
    RateOpt,
    SamplesOpt,
    ScheduleName,
    ScheduleOpt,
    SitesOpt,
    StateOpt,
    StepsOpt,
)
from .groups import Building, Speaking, grouped
from .output import print_error
from .parameters import (
    CheckpointArg,
    DeviceOpt,
    DryRunOpt,
    ExcludeOpt,
    ForceOpt,
    OutputOpt,
    ReportOpt,
)

if TYPE_CHECKING:
    from ..plan import SitePlan


@grouped
def fit(
    checkpoint: CheckpointArg,
    data: DataArg,
    building: Building,
    speaking: Speaking,
    output: OutputOpt = None,
    sites: SitesOpt = None,
    exclude: ExcludeOpt = None,
    rank: RankOpt = 96,
    from_tokens: FromTokensOpt = None,
    hidden: HiddenOpt = 256,
    steps: StepsOpt = 10_000,
    loss: LossOpt = FitLossName.centred,
    learning_rate: RateOpt = 1e-3,
    schedule: ScheduleOpt = ScheduleName.cosine,
    energy: FitEnergyOpt = 0.99,
    max_attention_error: FitErrorOpt = 0.25,
    patience: PatienceOpt = None,
    seed: FitSeedOpt = 0,
    samples: SamplesOpt = 64,
    batch: BatchOpt = 1,
    state: StateOpt = None,
    device: DeviceOpt = "cpu",
    dry_run: DryRunOpt = False,
    force: ForceOpt = False,
    report: ReportOpt = None,
) -> int:
    """Fit factor networks to biases that depend on the input, and write the converted model.

    Nothing but the networks is trained. Where a fit does not keep what is asked for, its site is
    left alone: the exit code is 4 if no site is left to convert (nothing is written), else 5. Where
    it does, and networks are slower than the bias as it is, by measurements, that serves, exactly,
    unless --from-tokens says when networks do.
    """
    fitting = Fitting(
        data=data,
        samples=samples,
        batch=batch,
        rank=rank,
        options={
            "hidden": hidden,
            "steps": steps,
            "loss": loss.value,
            "learning_rate": learning_rate,
            "schedule": schedule.value,
            "energy": energy,
            "max_attention_error": max_attention_error,
            "patience": patience,
            "seed": seed,
        },
        planning={
            "include": tuple(sites or ()),
            "exclude": tuple(exclude or ()),
            "state": state,
            "from_tokens": from_tokens,
        },
    )
    fitting.check()
    request = Request(
        command="fit",
        checkpoint=checkpoint,
        output=output,
        max_shard_size=None,
        card=False,
        options={},
        include=(),
        exclude=(),
        building=building,
        device=device,
        dtype=None,
        dry_run=dry_run,
        force=force,
        report=report,
        speaking=speaking,
        calibrating=fitting,
    )
    try:
        code = run_conversion(request)
    except NothingToConvertError as error:
        raise _not_reached(fitting, error) from error
    if fitting.missed:
        print_error(f"{_count(fitting)}, the rest was converted: {_which(fitting.missed)}")
    if fitting.kept and not speaking.quiet:
        many = f"{len(fitting.kept)} site{'s' if len(fitting.kept) > 1 else ''}"
        print(f"note: {many} with the bias as it is: {_which(fitting.kept)}", file=sys.stderr)
    return code


def _not_reached(fitting: Fitting, error: NothingToConvertError) -> Exception:
    """The error to end with: of a fit that missed, or that there was nothing to fit."""
    if not fitting.missed:
        return error
    found = FitError(
        f"{_count(fitting)}, nothing was written: {_which(fitting.missed)}",
        "try a larger --rank, more --steps and inputs, or accept less: --energy",
    )
    found.told = getattr(error, "told", {})  # type: ignore[attr-defined]
    return found


def _count(fitting: Fitting) -> str:
    many = len(fitting.missed)
    return f"{many} fit{'s' if many > 1 else ''} missed what was asked"


def _which(sites: list[SitePlan]) -> str:
    """The first of them, and why."""
    return "; ".join(f"{site.name or '(the model)'}: {site.reason}" for site in sites[:3])
