"""``flashbias-convert inspect``: decide, and change nothing."""

from __future__ import annotations

from .calibration import (
    CalibrationOpt,
    CalibrationSamplesOpt,
    MaxOutputErrorOpt,
    calibrating,
)
from .config_file import ConfigOpt
from .conversion import Request, run_conversion
from .parameters import (
    ArchArgsOpt,
    ArchOpt,
    CheckpointArg,
    DebugOpt,
    DeviceOpt,
    DiagonalOpt,
    DtypeOpt,
    EnergyOpt,
    ExcludeOpt,
    FillOpt,
    ForceAllOpt,
    HtmlOpt,
    IncludeOpt,
    JsonOpt,
    MaxAttentionErrorOpt,
    MaxRankOpt,
    Method,
    MethodOpt,
    PlotOpt,
    QuietOpt,
    RecipeOpt,
    ReportOpt,
    TargetOpt,
    TokensOpt,
    VerboseOpt,
    WindowOpt,
)


def inspect(
    checkpoint: CheckpointArg,
    energy: EnergyOpt = 0.99,
    method: MethodOpt = Method.auto,
    max_rank: MaxRankOpt = None,
    max_attention_error: MaxAttentionErrorOpt = 0.25,
    include: IncludeOpt = None,
    exclude: ExcludeOpt = None,
    fill: FillOpt = True,
    diagonal: DiagonalOpt = False,
    force_all: ForceAllOpt = False,
    calibration: CalibrationOpt = None,
    calibration_samples: CalibrationSamplesOpt = None,
    max_output_error: MaxOutputErrorOpt = None,
    target: TargetOpt = None,
    tokens: TokensOpt = None,
    recipe: RecipeOpt = None,
    arch: ArchOpt = None,
    arch_args: ArchArgsOpt = None,
    window: WindowOpt = None,
    device: DeviceOpt = "cpu",
    dtype: DtypeOpt = None,
    plot: PlotOpt = None,
    html: HtmlOpt = None,
    config: ConfigOpt = None,
    report: ReportOpt = None,
    json: JsonOpt = False,
    debug: DebugOpt = False,
    verbose: VerboseOpt = 0,
    quiet: QuietOpt = False,
) -> int:
    """Show what convert would do, and change nothing.

    The exit code is the one that convert would end with. Where no known architecture has the
    tensors, the biases that can be made from them alone are looked at.
    """
    request = Request(
        command="inspect",
        checkpoint=checkpoint,
        output=None,
        max_shard_size=None,
        card=False,
        options={
            "energy": energy,
            "method": method.value,
            "max_rank": max_rank,
            "max_attention_error": max_attention_error,
            "target": target,
            "tokens": tokens,
            "fill": fill,
            "diagonal": diagonal,
            "force_all": force_all,
        },
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        recipe_files=tuple(recipe or ()),
        arch=arch,
        arch_args=arch_args,
        device=device,
        dtype=None if dtype is None else dtype.value,
        dry_run=True,
        force=False,
        report=report,
        as_json=json,
        verbose=verbose,
        quiet=quiet,
        calibrating=calibrating(
            calibration,
            calibration_samples,
            max_output_error,
            {
                "max_rank": max_rank,
                "include": tuple(include or ()),
                "exclude": tuple(exclude or ()),
                "target": target,
                "tokens": tokens,
            },
        ),
        plot=plot,
        html=html,
        window=window,
    )
    return run_conversion(request)
