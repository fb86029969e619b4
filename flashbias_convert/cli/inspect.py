"""``flashbias-convert inspect``: decide, and change nothing."""

from __future__ import annotations

from .config_file import ConfigOpt
from .conversion import Request, run_conversion
from .groups import Building, Converting, Speaking, grouped
from .parameters import (
    CheckpointArg,
    DeviceOpt,
    DtypeOpt,
    HtmlOpt,
    PlotOpt,
    ReportOpt,
    WindowOpt,
)


@grouped
def inspect(
    checkpoint: CheckpointArg,
    converting: Converting,
    building: Building,
    speaking: Speaking,
    window: WindowOpt = None,
    device: DeviceOpt = "cpu",
    dtype: DtypeOpt = None,
    plot: PlotOpt = None,
    html: HtmlOpt = None,
    config: ConfigOpt = None,
    report: ReportOpt = None,
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
        options=converting.options(),
        **converting.sites(),
        building=building,
        device=device,
        dtype=None if dtype is None else dtype.value,
        dry_run=True,
        force=False,
        report=report,
        speaking=speaking,
        calibrating=converting.calibrating(),
        plot=plot,
        html=html,
        window=window,
    )
    return run_conversion(request)
