"""Where shards cannot be converted one by one, that is said before it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashbias_convert import inspect_model
from flashbias_convert.checkpoint import convert_checkpoint, open_to_convert
from flashbias_convert.errors import UsageError

from ..models import tiny_weights, write_tiny
from .shards import TINY, swin

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_old_formats_are_converted_in_memory_and_that_is_said(tmp_path: Path) -> None:
    source = swin(tmp_path / "m", "bin")
    for path in source.glob("*.bin"):
        old = torch.load(path)
        torch.save(old, path, _use_new_zipfile_serialization=False)
    done = convert_checkpoint(source, tmp_path / "out", **TINY)
    assert done.held is not None and done.held.reason.startswith("pytorch_model-00001")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("why", ["another size", "one file", "has to run", "decomposed on meta"])
def test_what_is_held_in_memory_is_said_before(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = swin(tmp_path / "m")
    options: dict[str, Any] = {
        "another size": {"max_shard_size": "1GB"},
        "one file": {"output": tmp_path / "one.safetensors"},
        "has to run": {"planner": lambda model: inspect_model(model)},
        "decomposed on meta": {"device": "meta"},
    }[why]
    sizes = [t.numel() for t in tiny_weights().values()]
    expected = f"in float32, and up to three times the {2 * sum(sizes) / 1e6:.1f} MB of its files"

    def opening(*args: Any, **given: Any) -> Any:
        assert why in caplog.text and expected in caplog.text
        return real(*args, **given)

    real = open_to_convert.open_checkpoint
    monkeypatch.setattr(open_to_convert, "open_checkpoint", opening)
    if why == "decomposed on meta":  # any other device but the CPU
        with pytest.raises(UsageError, match="meta"):
            convert_checkpoint(source, tmp_path / "out", **TINY, **options)
        return
    held = convert_checkpoint(source, **{"output": tmp_path / "out", **TINY, **options}).held
    assert held is not None and why in held.reason
    assert (held.model_bytes, held.file_bytes) == (4 * sum(sizes), 2 * sum(sizes))


def test_one_file_has_no_shards_to_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_tiny(tmp_path / "one.safetensors")
    assert convert_checkpoint(source, **TINY, max_shard_size="1GB").held is None
    assert "in memory" not in caplog.text
