"""``flashbias-convert convert``: the command that may be left out."""

from __future__ import annotations

from ..errors import UsageError
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
    CardOpt,
    CheckpointArg,
    DebugOpt,
    DeviceOpt,
    DiagonalOpt,
    DryRunOpt,
    DtypeOpt,
    EnergyOpt,
    ExcludeOpt,
    FillOpt,
    ForceAllOpt,
    ForceOpt,
    IncludeOpt,
    JsonOpt,
    MaxAttentionErrorOpt,
    MaxRankOpt,
    Method,
    MethodOpt,
    OutputOpt,
    QuietOpt,
    RecipeOpt,
    ReportOpt,
    ShardSizeOpt,
    TargetOpt,
    TokensOpt,
    VerboseOpt,
)
from .verification import (
    SAMPLES,
    CompareDtype,
    Comparing,
    MaxDifferenceOpt,
    MinAgreementOpt,
    VerifyDtypeOpt,
    VerifyInputsOpt,
    VerifyOpt,
    VerifySamplesOpt,
)


def convert(
    checkpoint: CheckpointArg,
    output: OutputOpt = None,
    max_shard_size: ShardSizeOpt = None,
    card: CardOpt = False,
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
    device: DeviceOpt = "cpu",
    dtype: DtypeOpt = None,
    dry_run: DryRunOpt = False,
    force: ForceOpt = False,
    verify: VerifyOpt = False,
    verify_inputs: VerifyInputsOpt = None,
    verify_samples: VerifySamplesOpt = None,
    verify_dtype: VerifyDtypeOpt = None,
    max_difference: MaxDifferenceOpt = None,
    min_agreement: MinAgreementOpt = None,
    config: ConfigOpt = None,
    report: ReportOpt = None,
    json: JsonOpt = False,
    debug: DebugOpt = False,
    verbose: VerboseOpt = 0,
    quiet: QuietOpt = False,
) -> int:
    """Convert a checkpoint and write the result beside it.

    Every attention module that adds a bias gets, head by head, the cheapest form of that bias
    that is good enough. The original is never changed.
    """
    wanted = {
        "--verify-inputs": verify_inputs,
        "--verify-samples": verify_samples,
        "--verify-dtype": verify_dtype,
        "--max-difference": max_difference,
        "--min-agreement": min_agreement,
    }
    given = [option for option, value in wanted.items() if value is not None]
    if given and not verify:
        raise UsageError(f"{given[0]} says how to verify", "add --verify")
    if verify and dry_run:
        raise UsageError("a dry run writes nothing that could be verified", "leave out --verify")
    comparing = None
    if verify:
        comparing = Comparing(
            inputs="random" if verify_inputs is None else verify_inputs,
            samples=SAMPLES if verify_samples is None else verify_samples,
            tokens=tokens,
            dtype=(verify_dtype or CompareDtype.float32).value,
            device=device,
            max_difference=max_difference,
            min_agreement=min_agreement,
        )
    request = Request(
        command="convert",
        checkpoint=checkpoint,
        output=output,
        max_shard_size=max_shard_size,
        card=card,
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
        dry_run=dry_run,
        force=force,
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
        comparing=comparing,
    )
    return run_conversion(request)
