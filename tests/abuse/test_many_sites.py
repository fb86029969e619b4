"""Models with thousands of sites: the work grows with their number, and no faster."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashbias_convert import inspect_model, load_model, patch_model, save_model, unpatch_model
from flashbias_convert.plan import Plan
from tests.toy import TOY, BiasedAttention

from .amount import FULL, amount
from .conftest import Count

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

#: four times the sites take four times as long; sixteen times where each looks at all others
FACTOR, SLACK = 4, 2.2
WIDTH = 10


def model(sites: int) -> nn.Module:
    """Tiny attentions in blocks of blocks: torch looks at all keys for each child of a module."""
    parts: list[nn.Module] = [BiasedAttention(dim=2, heads=1, tokens=2) for _ in range(sites)]
    while len(parts) > 1:
        parts = [nn.Sequential(*parts[i : i + WIDTH]) for i in range(0, len(parts), WIDTH)]
    return parts[0].eval()


def build(sites: int) -> Callable[[], nn.Module]:
    return lambda: model(sites)


def seconds(work: Callable[[], object], times: int) -> float:
    """Time of this process alone, the best of a few.

    Without garbage collection, which looks at all that there is, however little is new.
    """
    found = []
    for _ in range(times):
        gc.collect()
        gc.disable()
        try:
            started = time.process_time()
            work()
            found.append(time.process_time() - started)
        finally:
            gc.enable()
    return min(found)


def everything(sites: int, folder: Path, times: int) -> dict[str, float]:
    """How long each step takes; exact terms, because factors are computed site by site anyway."""
    tried = model(sites)
    path = folder / f"{sites}.safetensors"
    names = [n for n, m in tried.named_modules() if isinstance(m, BiasedAttention)]
    options: dict[str, Any] = {"recipes": [TOY], "force_all": True, "method": "exact"}
    plans: list[Plan] = []

    def by_name() -> None:
        assert len(inspect_model(tried, include=names, **options).patched) == sites

    def patch() -> None:
        unpatch_model(tried)
        plans.append(patch_model(tried, **options))

    def as_json() -> None:
        text = json.dumps(plans[-1].to_json())
        assert len(Plan.from_json(json.loads(text)).patched) == sites

    def run() -> None:
        with torch.inference_mode():
            tried(torch.zeros(1, 2, 2))

    def save() -> None:
        save_model(tried, path, arch=build(sites), plan=plans[-1], recipes=[TOY], force=True)

    def load() -> None:
        load_model(path, arch=build(sites), recipes=[TOY])

    steps = (by_name, patch, as_json, run, save, load)
    return {step.__name__: seconds(step, times) for step in steps}


def test_the_work_grows_with_the_number_of_sites(tmp_path: Path, count: Count) -> None:
    sites = amount(120, 10_000)
    many = everything(sites, tmp_path, 1)
    count("sites", "in one model", sites)
    if not FULL:  # every step was done; a clock says something about many sites alone
        return
    few = everything(sites // FACTOR, tmp_path, 2)
    for step, taken in many.items():
        count("milliseconds for all sites", step, round(1000 * taken))
        allowed = SLACK * FACTOR * few[step] + 0.02
        assert taken < allowed, f"{step}: {few[step]:.3f} s become {taken:.3f} s"
