"""Attention over maps (B, C, H, W): tokens come to the kernel as rows, however maps are laid out.

A compiler hands an operator what it gets in eager mode. Where it computes convolutions with their
channels last, tokens that are columns would be turned around before each call.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert.modules import ScoreBiasModule
from tests.recipes import test_levit, test_small_tables, test_timm_rel_pos
from tests.recipes.parity import Case

CASES = [test_small_tables.CASCADED, test_small_tables.group(), test_small_tables.DOWN,
         test_levit.CONV, test_levit.downsample(True), test_timm_rel_pos.COATNET]  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_rows(case: Case, layout: torch.memory_format) -> None:
    model, x = case.model(), case.inputs().to(memory_format=layout)
    case.patch(model)
    steps: list[int] = []

    def look(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        steps.extend(tensor.stride(-1) for tensor in args[:3])

    for module in model.modules():
        if isinstance(module, ScoreBiasModule):
            module.register_forward_pre_hook(look)
    case.output(model, x)
    assert steps and set(steps) == {1}


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_transforms_of_torch_go_through(case: Case) -> None:
    """`vmap` does not know maps with channels last."""
    model, x = case.model(), case.inputs()
    model.eval()  # not all of them give themselves back
    case.patch(model)
    with torch.no_grad():
        found = torch.func.vmap(lambda one: case.output(model, one[None])[0])(x)
        torch.testing.assert_close(found, case.output(model, x), rtol=1e-3, atol=1e-3)
