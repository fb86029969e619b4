"""What `convert` and `inspect` have in common: run a conversion, and tell about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FlashBiasError, VerificationError
from ..options import DecomposeOptions, shard_bytes
from .calibration import Calibrating
from .fitting import Fitting
from .groups import Building, Speaking
from .output import Output
from .pictures import check_pictures, draw_pictures
from .reports import check_report
from .telling import exit_code, tell, tell_failed_sites, tell_failure
from .values import json_object, load_recipes, torch_device
from .verification import Comparing, quiet_libraries

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from torch import nn

    from ..checkpoint import Conversion
    from ..plan import Plan
    from ..recipe import Recipe
    from ..verification import Verification


@dataclass(frozen=True)
class Request:
    """What the user asked for; the fields are the options of the command line."""

    command: str
    checkpoint: Path
    output: Path | None
    max_shard_size: str | None
    card: bool
    options: Mapping[str, Any]
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    building: Building
    device: str
    dtype: str | None
    dry_run: bool
    force: bool
    report: Path | None
    speaking: Speaking
    comparing: Comparing | None = None
    calibrating: Calibrating | Fitting | None = None
    plot: Path | None = None
    html: Path | None = None
    window: str | None = None
    link: bool = False

    @property
    def recipe_files(self) -> tuple[Path, ...]:
        """Files with recipes."""
        return tuple(self.building.recipe or ())


def run_conversion(request: Request) -> int:
    """Convert or inspect a checkpoint; returns the exit code.

    Raises:
        FlashBiasError: as `convert_checkpoint`; where there is a plan, the table was shown, the
            report and the pictures were made, and the error carries the plan as JSON in `told`.
    """
    options = DecomposeOptions(**request.options)
    if request.max_shard_size is not None:
        shard_bytes(request.max_shard_size)  # refused before torch is imported
    arch_args = json_object(request.building.arch_args)
    _check_reports(request)
    if request.comparing is not None:
        request.comparing.check()
    output = Output(request.speaking.json, request.speaking.quiet, request.speaking.verbose)
    started = time.perf_counter()
    plans: list[tuple[Plan, nn.Module]] = []
    verifications: list[Verification] = []

    def on_plan(plan: Plan, model: nn.Module) -> None:
        plans.append((plan, model))

    try:
        done = _convert(request, options, arch_args, output, on_plan, verifications.append)
    except FlashBiasError as error:
        if plans:
            tell_failure(request, output, plans[0][0], error)
            draw_pictures(request, output, *plans[0])
        raise
    seconds = time.perf_counter() - started
    pictures = draw_pictures(request, output, *plans[0])
    tell(request, output, done, seconds, verifications[0] if verifications else None, pictures)
    tell_failed_sites(request, done.plan)
    return exit_code(request, done.plan)


def _check_reports(request: Request) -> None:
    check_pictures(request)
    if request.report is None:
        return
    from ..checkpoint.outputs import output_path

    sharded = request.max_shard_size is not None
    target = output_path(request.checkpoint, request.output, sharded=sharded)
    check_report(request.report, sources=[request.checkpoint], output=target, force=request.force)


def _convert(
    request: Request,
    options: DecomposeOptions,
    arch_args: dict[str, Any],
    output: Output,
    on_plan: Callable[[Plan, nn.Module], None],
    on_verification: Callable[[Verification], None],
) -> Conversion:
    inputs = None if request.comparing is None else request.comparing.inputs
    data = request.calibrating.data if isinstance(request.calibrating, Fitting) else None
    quiet_libraries(request.building.arch, inputs, data)  # before the libraries are imported
    import torch

    from ..bare import parse_window
    from ..checkpoint import convert_checkpoint

    recipes = load_recipes(request.recipe_files)
    planner = None if request.calibrating is None else request.calibrating.planner
    window = None if request.window is None else parse_window(request.window)
    with output.progress("reading", "decomposing") as progress:
        return convert_checkpoint(
            request.checkpoint,
            request.output,
            options=options,
            include=request.include,
            exclude=request.exclude,
            recipes=recipes,
            arch=request.building.arch,
            arch_args=arch_args,
            device=torch_device(request.device),
            dtype=None if request.dtype is None else getattr(torch, request.dtype),
            dry_run=request.dry_run,
            force=request.force,
            max_shard_size=request.max_shard_size,
            card=request.card,
            progress=progress,
            on_plan=on_plan,
            check=_check(request, arch_args, recipes, on_verification),
            planner=planner(recipes, progress) if planner is not None else None,
            copying=None if progress is None else progress.copying,
            window=window,
            link=request.link,
        )


def _check(
    request: Request,
    arch_args: Mapping[str, Any],
    recipes: Sequence[Recipe],
    on_verification: Callable[[Verification], None],
) -> Callable[[Path], None] | None:
    """A function that raises VerificationError for a file that must not be kept."""
    comparing = request.comparing
    if comparing is None:
        return None

    def check(written: Path) -> None:
        found = comparing.run(
            request.checkpoint,
            written,
            arch=request.building.arch,
            arch_args=arch_args,
            recipes=recipes,
        )
        if not found.passed:
            raise VerificationError(
                f"not verified, nothing was kept: {'; '.join(found.reasons)}",
                "see --method exact, --energy, --max-difference and --min-agreement",
                found,
            )
        on_verification(found)

    return check
