"""``tune``: what it refuses on a machine without a card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .conftest import Cli


def test_there_is_nothing_to_tune_on_a_cpu(cli: Cli, tmp_path: Path) -> None:
    done = cli("tune", tmp_path / "model.flashbias.safetensors", "--device", "cpu")
    assert done.code == 2
    assert "nothing to tune on cpu" in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_a_card_that_is_not_there_is_told(cli: Cli, tmp_path: Path) -> None:
    done = cli("tune", tmp_path / "model.flashbias.safetensors")
    assert done.code == 2
    assert "cuda" in done.err
    assert not list(tmp_path.iterdir())
