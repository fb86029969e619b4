"""What is compared of SwinUNETR, without compiling it: that takes minutes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "paper")]

import check_compiled_unetr as script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_windows_hold_the_normed_map() -> None:
    x = torch.randn(2, 3, 10, 10, 10)
    windows = script.Windows(3)(x).unflatten(0, (2, 2, 2, 2)).unflatten(-2, (7, 7, 7))
    normed = torch.nn.functional.layer_norm(x.movedim(1, -1), (3,))
    torch.testing.assert_close(windows[1, 0, 0, 0, 2, 3, 4], normed[1, 2, 3, 4])
    torch.testing.assert_close(windows[1, 1, 0, 1, 1, 3, 2], normed[1, 8, 3, 9])
    assert not windows[:, 1, 0, 0, 3:].any()  # padding


@pytest.mark.parametrize("fault", [0.0, 0.1])
def test_a_wrong_compiler_is_noticed(
    fault: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch._inductor import config

    def compiled(module: Any, **_: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            return module(x) + (fault if config.comprehensive_padding else 0.0)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(sys, "argv", ["script", "--tiny", "--device", "cpu"])
    assert script.main() == int(fault > 0)
    told = capsys.readouterr().out.splitlines()
    assert len(told) >= 2
    for line in told:
        assert abs(float(line.split()[-1]) - fault * (" padded " in line)) < 1e-4
