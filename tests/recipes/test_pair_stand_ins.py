"""Recipes for pair biases on modules of the same interfaces: values in each dtype, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pair_stand_ins import STAND_INS, inputs
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import Case, randomised

BIAS = ("linear.weight", "linear_z.weight", "linear_nobias_z.weight", "proj_z.1.weight")


def case(name: str, tokens: int = 9) -> Case:
    cls, recipe = STAND_INS[name]
    large = {"0.linear.": 1.0, "linear_z": 1.0, "linear_nobias_z": 1.0, "proj_z.1": 1.0}

    def make() -> Any:
        return randomised(nn.ModuleList([cls()]), 0.4, **large)

    def run(model: Any) -> Tensor:
        given = inputs(name, tokens, next(model.parameters()).dtype)
        out: Tensor = model[0](**given)
        # rows of which nothing is visible are a mean of padding, or zeros
        return out[given["mask"].bool()] if name.endswith("triangle") else out

    return Case(make, run, BIAS, {"patched": 1}, {"recipes": [recipe]})


@pytest.mark.parametrize(("dtype", "backend"), parity.PATHS)
@pytest.mark.parametrize("name", STAND_INS)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(case(name), dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STAND_INS)
def test_saved_and_loaded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parity.check_file(case(name), tmp_path, dtype)


@pytest.mark.parametrize("name", STAND_INS)
def test_comes_and_goes(name: str) -> None:
    parity.check_comes_and_goes(case(name), pickles=False)
    parity.check_follows_weights(case(name))
    parity.check_training(case(name))
