"""``flashbias-convert convert``: the command that may be left out."""

from __future__ import annotations

from ..errors import UsageError
from .config_file import ConfigOpt
from .conversion import Request, run_conversion
from .groups import Building, Converting, Speaking, grouped
from .parameters import (
    CardOpt,
    CheckpointArg,
    DeviceOpt,
    DryRunOpt,
    DtypeOpt,
    ForceOpt,
    LinkOpt,
    OutputOpt,
    ReportOpt,
    ShardSizeOpt,
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


@grouped
def convert(
    checkpoint: CheckpointArg,
    converting: Converting,
    building: Building,
    speaking: Speaking,
    output: OutputOpt = None,
    max_shard_size: ShardSizeOpt = None,
    link: LinkOpt = False,
    card: CardOpt = False,
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
            tokens=converting.tokens,
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
        link=link,
        card=card,
        options=converting.options(),
        **converting.sites(),
        building=building,
        device=device,
        dtype=None if dtype is None else dtype.value,
        dry_run=dry_run,
        force=force,
        report=report,
        speaking=speaking,
        calibrating=converting.calibrating(),
        comparing=comparing,
    )
    return run_conversion(request)
