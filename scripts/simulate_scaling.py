"""How work before serving scales with the number of processes, from measured times of its parts.

    python scripts/simulate_scaling.py                # minutes on one core, and two for a check

Four jobs run on this process alone, on one thread, and the seconds of every part are kept: SVDs of
the 24 sites of a SwinV2, a calibration (forms of its 8 sites, then runs on 16 batches), fits of 16
layers, and factors of 64 structures of 96 to 384 tokens. `spread` gives the longest part away
first, as far as it can be told before (`assignment.assigned`); a step takes as long as the process
with most to do, and what is not shared out, and the exchange of results (each process packs its own
and unpacks all), takes as long as on one. No network is part of this: results are some megabytes.
"bound" is what no order of the parts could beat. The job itself runs on two processes, too (gloo),
for the row of two.

Seconds are those of the processor, not of the clock: the turns of other programs do not count.
What they do to shared caches and cores does: beside them, all seconds grow, and since each part
is timed once, speed-ups that the longest part decides (as many processes as parts) move most.
Writes `scripts/results/simulate_scaling.csv` and a picture.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from two_gpus.pairs import RECIPE, PairModel, pair_inputs

from flashbias_convert.assignment import assigned

RESULTS = Path(__file__).resolve().parent / "results/simulate_scaling.csv"
PROCESSES = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = (
    "job", "parts", "processes", "seconds", "speed_up", "bound", "measured_seconds",
    "shared_seconds", "other_seconds", "exchange_seconds", "longest_part", "size", "torch",
)  # fmt: skip
Job = Callable[[Any], Any]


@dataclass
class Measured:
    """Seconds of a job on one process.

    Attributes:
        steps: seconds of every part, step by step; each step waits for the one before.
        costs: what each part was expected to cost, by which parts are shared out.
        total: of everything.
        exchange: to pack and unpack the results of all steps.
    """

    steps: list[list[float]] = field(default_factory=list)
    costs: list[Sequence[float]] = field(default_factory=list)
    total: float = 0.0
    exchange: float = 0.0

    @property
    def other(self) -> float:
        """What is not shared out."""
        return max(0.0, self.total - sum(map(sum, self.steps)))

    def on(self, processes: int) -> float:
        """Seconds on several processes, as `spread` shares parts out."""
        exchange = self.exchange if processes > 1 else 0.0
        return (
            self.other
            + exchange
            + sum(
                slowest(step, costs, processes)
                for step, costs in zip(self.steps, self.costs, strict=True)
            )
        )

    def bound(self, processes: int) -> float:
        """The highest speed-up that any order of the parts could have."""
        least = sum(max(sum(s) / processes, max(s, default=0.0)) for s in self.steps)
        exchange = self.exchange if processes > 1 else 0.0
        return self.total / (self.other + exchange + least)


def slowest(parts: Sequence[float], costs: Sequence[float], processes: int) -> float:
    """Seconds of the process that has most to do, as parts of these costs are shared out."""
    return max(sum(parts[at] for at in some) for some in assigned(costs, processes))


def main() -> int:
    """Measure, simulate, compare with two processes, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in JOBS:
        found, two = measure(name, options.tiny), on_two(name, options.tiny)
        rows += rows_of(name, found, two, options.tiny)
        for row in rows[-len(PROCESSES) :]:
            print({k: v for k, v in row.items() if v != ""}, flush=True)
    options.output.parent.mkdir(exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, options.output.with_suffix(".png"))
    return 0


def rows_of(name: str, found: Measured, two: float, tiny: bool) -> list[dict[str, Any]]:
    """A row for every number of processes."""
    measured = {1: found.total, 2: two}
    parts = [part for step in found.steps for part in step]
    return [
        {
            "job": name,
            "parts": " then ".join(dict.fromkeys(str(len(step)) for step in found.steps)),
            "processes": count,
            "seconds": f"{found.on(count):.3f}",
            "speed_up": f"{found.total / found.on(count):.2f}",
            "bound": f"{found.bound(count):.2f}",
            "measured_seconds": f"{measured[count]:.3f}" if count in measured else "",
            "shared_seconds": f"{sum(parts):.3f}",
            "other_seconds": f"{found.other:.3f}",
            "exchange_seconds": f"{found.exchange:.4f}",
            "longest_part": f"{max(parts):.3f}",
            "size": "tiny" if tiny else "small",
            "torch": torch.__version__,
        }
        for count in PROCESSES
    ]


# -- measuring -----------------------------------------------------------------------------


def measure(name: str, tiny: bool) -> Measured:
    """Run a job on this process alone."""
    JOBS[name](True)(None)  # libraries are loaded, and code is compiled
    job, found = JOBS[name](tiny), Measured()
    with parts_timed(found):
        started = time.process_time()
        job(None)
        found.total = time.process_time() - started - found.exchange
    return found


@contextmanager
def parts_timed(found: Measured) -> Iterator[None]:
    """Inside, calls that could be shared out are timed one by one.

    A calibration runs the original on inputs that `own` has shared out, and exchanges nothing:
    those runs are a step, too.
    """
    inside, runs = [False], []

    def outputs(*args: Any) -> Any:
        started = time.process_time()
        found = real_outputs(*args)
        if not inside[0]:
            runs.append(time.process_time() - started)
        return found

    def each(
        work: Sequence[Callable[[], Any]], group: Any, costs: Sequence[float] | None = None
    ) -> list[Any]:
        found.costs.append([1.0] * len(work) if costs is None else costs)
        seconds, results, inside[0] = [], [], True
        for call in work:
            started = time.process_time()
            results.append(call())
            seconds.append(time.process_time() - started)
        inside[0] = False
        found.steps.append(seconds)
        started = time.process_time()
        pickle.loads(pickle.dumps(results))
        found.exchange += time.process_time() - started
        return results

    rooms = ("calibration.calibrate", "fitting.sites", "shares")
    modules = [importlib.import_module(f"flashbias_convert.{room}") for room in rooms]
    before, real_outputs = [module.each for module in modules], modules[0].outputs_of
    modules[0].outputs_of = outputs
    for module in modules:
        module.each = each
    try:
        yield
        if runs:
            found.steps.append(runs)
            found.costs.append([1.0] * len(runs))
    finally:
        modules[0].outputs_of = real_outputs
        for module, kept in zip(modules, before, strict=True):
            module.each = kept


def on_two(name: str, tiny: bool) -> float:
    """Seconds of the busier of two processes that share a job out."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(one_of_two, (name, tiny, folder), nprocs=2, start_method="spawn")
        return max(float(Path(folder, f"{rank}.txt").read_text()) for rank in (0, 1))


def one_of_two(rank: int, name: str, tiny: bool, folder: str) -> None:
    """What each of them does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    JOBS[name](True)(dist.group.WORLD)
    job = JOBS[name](tiny)
    started = time.process_time()
    job(dist.group.WORLD)
    Path(folder, f"{rank}.txt").write_text(str(time.process_time() - started))
    dist.destroy_process_group()


# -- jobs ----------------------------------------------------------------------------------


def swin(depths: Sequence[int], heads: Sequence[int], window: int, size: int) -> nn.Module:
    """A SwinV2 with thin heads: biases do not depend on them."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(
        "swinv2_tiny_window8_256", img_size=size, patch_size=2, window_size=window,
        embed_dim=16 * heads[0], depths=depths, num_heads=heads, num_classes=10,
    )  # fmt: skip
    for key, parameter in model.named_parameters():
        if key.endswith(("norm1.weight", "norm2.weight")):
            parameter.data.fill_(1)
        elif "cpb_mlp" in key:
            parameter.data.mul_(4)
    return model.eval()


def svd_job(tiny: bool) -> Job:
    """SVDs of sites; on one process they are shared out to nobody, but timed alike."""
    from flashbias_convert import shares
    from flashbias_convert.inspection import inspect_model
    from flashbias_convert.inspection.finding import find_sites
    from flashbias_convert.inspection.groups import expected_work
    from flashbias_convert.inspection.planning import plan_site
    from flashbias_convert.options import DecomposeOptions
    from flashbias_convert.recipe import Registry

    model = swin((1, 1), (2, 2), 8, 32) if tiny else swin((2, 2, 18, 2), (4, 8, 16, 32), 16, 256)
    options = DecomposeOptions(method="svd", energy=0.9, force_all=True)

    def job(group: Any) -> Any:
        if group is not None:
            return inspect_model(model, method="svd", energy=0.9, force_all=True, group=group)
        matches = list(find_sites(model, Registry(()), None))
        with torch.no_grad():
            costs = [expected_work(match.site.module) for match in matches]
            work = [partial(plan_site, m, options, None) for m in matches]
            return shares.each(work, None, costs)

    return job


def calibrate_job(tiny: bool) -> Job:
    from flashbias_convert.calibration import calibrate_model

    model = swin((1, 1), (2, 2), 8, 32) if tiny else swin((2, 6), (4, 8), 8, 64)
    count = 2 if tiny else 16
    size = 32 if tiny else 64
    x = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))
    return lambda group: calibrate_model(model, list(x.split(1)), group=group)


def fit_job(tiny: bool) -> Job:
    from flashbias_convert import fit_sites
    from flashbias_convert.decompose.neural_options import FitOptions

    model, inputs = PairModel(2 if tiny else 16).eval(), pair_inputs(12 if tiny else 128)
    steps = 4 if tiny else 60
    options = FitOptions(
        hidden=16 if tiny else 128, steps=steps, check_every=steps // 2, energy=0.999999
    )
    return lambda group: fit_sites(
        model, inputs, rank=4 if tiny else 32, options=options, recipes=[RECIPE], group=group
    )


def structures_job(tiny: bool) -> Job:
    from flashbias_convert import shares
    from flashbias_convert.decompose.svd import truncated_svd

    sizes = torch.randint(96, 385, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = [16, 24] if tiny else sizes

    def factors(at: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(at)
        ends = torch.randn(2, 4, sizes[at], 12, generator=generator)
        noise = torch.randn(4, sizes[at], sizes[at], generator=generator)
        term = truncated_svd(ends[0] @ ends[1].mT + 0.1 * noise, energy=0.99).term
        return term.phi_q, term.phi_k

    work, costs = [partial(factors, at) for at in range(len(sizes))], [n**3 for n in sizes]
    return lambda group: shares.each(work, group, costs)


JOBS: dict[str, Callable[[bool], Job]] = {
    "SVDs of 24 sites": svd_job,
    "calibration of 8 sites": calibrate_job,
    "fits of 16 layers": fit_job,
    "factors of 64 structures": structures_job,
}


# -- the picture ---------------------------------------------------------------------------


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up by the number of processes."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 4), layout="constrained")
    axes.plot(PROCESSES, PROCESSES, color="lightgrey", label="linear")
    for at, name in enumerate(JOBS):
        own = [row for row in rows if row["job"] == name]
        colour = f"C{at}"
        up = [float(row["speed_up"]) for row in own]
        axes.plot(PROCESSES, up, "o-", color=colour, label=name, markersize=4)
        bound = [float(row["bound"]) for row in own]
        axes.plot(PROCESSES, bound, ":", color=colour, linewidth=1)
        two = float(own[0]["measured_seconds"]) / float(own[1]["measured_seconds"])
        axes.plot([2], [two], "x", color=colour, markersize=8)
    axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="speed-up")
    axes.set_xticks(PROCESSES, [str(count) for count in PROCESSES])
    axes.set_yticks(PROCESSES, [str(count) for count in PROCESSES])
    axes.minorticks_off()
    axes.set_title("simulated; dotted: any order; x: measured on two", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
