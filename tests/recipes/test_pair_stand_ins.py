"""Recipes for pair biases on modules of the same interfaces: values in each dtype, and files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from flashbias_convert import patch_model
from tests.pair_stand_ins import STAND_INS, inputs
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import Case, randomised
from tests.support import assert_parity, nudged

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


class Alone(nn.Module):
    """A module by itself; rows of a triangle of which nothing is visible are zero."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.triangle, self.names = name.endswith("triangle"), list(inputs(name))
        self.module = case(name).make()[0]

    def forward(self, first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
        given = dict(zip(self.names, (first, second, third), strict=False))
        out: Tensor = self.module(**given)
        return out * second.unsqueeze(-1) if self.triangle else out  # the mask


@torch.no_grad()
def check_lengths(name: str, function: Any) -> None:
    """It computes what the original does: at first, longer, shorter, and as at first again."""
    for tokens in (9, 14, 6, 9):
        given, original = tuple(inputs(name, tokens).values()), Alone(name).eval()

        def true(model: nn.Module, given: tuple[Tensor, ...] = given) -> Tensor:
            out: Tensor = copy.deepcopy(model).double()(*(x.double() for x in given))
            return out

        def nearby(
            number: int, given: tuple[Tensor, ...] = given, own: nn.Module = original
        ) -> tuple[Tensor, Tensor]:
            twin = nudged(own, number)
            return twin(*given), true(twin)

        assert_parity(function(*given), original(*given), true(original), nearby=nearby)


def alone_and_patched(name: str) -> Alone:
    model = Alone(name).eval()
    _, recipe = STAND_INS[name]
    plan = patch_model(model, recipes=[recipe], backend="sdpa", force_all=True)
    assert plan.counts() == {"patched": 1}
    return model


KINDS = ["boltz_triangle", "openfold_msa", "openfold3_pair_bias", "boltz_pair_bias"]


@pytest.mark.parametrize("name", KINDS)
def test_compiled_it_serves_other_lengths(name: str) -> None:
    torch.compiler.reset()
    model = alone_and_patched(name)
    check_lengths(name, torch.compile(model, backend="eager"))
    check_lengths(name, model)


@pytest.mark.parametrize("name", STAND_INS)
def test_exported_it_serves_other_lengths(name: str) -> None:
    """Sizes that a program fixed would be refused; ranges of them torch cannot prove for all."""
    model, given = alone_and_patched(name), tuple(inputs(name).values())
    sizes = [{at: Dim.DYNAMIC for at, n in enumerate(x.shape) if n == 9} for x in given]
    with torch.no_grad():
        program = torch.export.export(model, given, dynamic_shapes=tuple(sizes))
    check_lengths(name, program.module())
