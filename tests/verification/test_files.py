"""Comparing files: the weights, too, and nothing is kept that does not agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashbias_convert import VerificationError, verify_files
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.checkpoint.weights import differing_weights
from flashbias_convert.errors import CheckpointError
from flashbias_convert.options import DecomposeOptions
from tests.checkpoint.models import ARGS, NAME, TiedToy, write_tiny, write_tiny_folder
from tests.toy import TOY

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TINY: dict[str, Any] = {"arch": f"timm:{NAME}", "arch_args": ARGS}
EXACT = DecomposeOptions(method="exact")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An original in half precision, and its exact conversion; do not change them."""
    source = write_tiny(tmp_path_factory.mktemp("v") / "tiny.safetensors", torch.float16)
    done = convert_checkpoint(source, options=EXACT, **TINY)
    assert done.output is not None
    return source, done.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_verified_without_saying_what_it_is(
    converted: tuple[Path, Path], dtype: torch.dtype
) -> None:
    found = verify_files(*converted, samples=4, dtype=dtype)
    assert found.passed and found.mode == "exact" and found.samples == 4
    assert len(found.sites) == 3


def test_double_precision_is_compared_in_single(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "x.safetensors", torch.float64)
    done = convert_checkpoint(source, options=EXACT, **TINY)
    assert done.output is not None
    found = verify_files(source, done.output, samples=2)
    assert found.passed and (found.dtype, found.wide_dtype) == ("float32", "float64")


def test_a_folder_is_verified(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    done = convert_checkpoint(folder, options=EXACT)
    assert done.output is not None
    assert verify_files(folder, done.output, samples=2).passed


def test_a_model_that_only_the_caller_can_build(tmp_path: Path) -> None:
    torch.save(TiedToy().state_dict(), tmp_path / "x.pt")
    options: dict[str, Any] = {"arch": TiedToy, "recipes": [TOY]}
    done = convert_checkpoint(tmp_path / "x.pt", options=EXACT, **options)
    assert done.output is not None
    inputs = {"inputs": lambda model: torch.randn(2, 36, 16)}
    assert verify_files(tmp_path / "x.pt", done.output, **options, **inputs).passed


def edited(path: Path, folder: Path, key: str, change: Any) -> Path:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors[key] = change(tensors[key])
    save_file(tensors, folder / path.name, metadata=metadata)
    return folder / path.name


def test_a_changed_weight_is_found_even_where_outputs_agree(
    converted: tuple[Path, Path], tmp_path: Path
) -> None:
    source, output = converted
    key = "layers.0.blocks.0.attn.proj.bias"  # zeros, and so they are with another sign
    other = edited(output, tmp_path, key, lambda t: -t)
    found = verify_files(source, other, samples=2)
    assert found.outputs[0].passed
    assert found.reasons == (
        f"1 weights in the converted file are not those of the original, such as {key}",
    )


def test_a_weight_that_terms_were_made_from_may_not_change(
    converted: tuple[Path, Path], tmp_path: Path
) -> None:
    source, output = converted
    key = "layers.0.blocks.0.attn.cpb_mlp.0.bias"
    other = edited(output, tmp_path, key, lambda t: t + 1)
    with pytest.raises(CheckpointError, match="made from other weights"):
        verify_files(source, other, samples=2)


def test_differing_weights_sees_bits_dtypes_and_names(
    converted: tuple[Path, Path], tmp_path: Path
) -> None:
    source, output = converted
    original = load_file(source)
    assert differing_weights(original, output) == []
    key = next(iter(original))
    assert differing_weights({**original, key: original[key].float()}, output) == [key]
    assert differing_weights({**original, key: -original[key]}, output) == [key]
    assert differing_weights({**original, "more": torch.ones(1)}, output) == ["more"]
    del original[key]
    assert differing_weights(original, output) == [key]
    nan = write_tiny(tmp_path / "x.safetensors", **{"norm.bias": torch.full((32,), torch.nan)})
    done = convert_checkpoint(nan, options=EXACT, **TINY)
    assert done.output is not None and differing_weights(load_file(nan), done.output) == []


@pytest.mark.parametrize("folder", [False, True])
def test_a_check_that_raises_keeps_nothing(tmp_path: Path, folder: bool) -> None:
    source = write_tiny_folder(tmp_path / "m")
    path = source if folder else source / "model.safetensors"
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    seen: list[Path] = []

    def refuse(written: Path) -> None:
        seen.append(written)
        assert verify_files(path, written, samples=1).passed  # it is complete
        raise VerificationError("no")

    with pytest.raises(VerificationError, match="no"):
        convert_checkpoint(path, options=EXACT, check=refuse)
    assert len(seen) == 1 and not seen[0].exists()
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before
