"""Pangu-Weather's published ONNX files: read by order and shape, checked against onnxruntime."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import load_model, unpatch_model
from flashbias_convert.checkpoint import convert_checkpoint, identify, open_model, read_checkpoint
from flashbias_convert.cli.app import run as run_program
from flashbias_convert.errors import CheckpointError, UnknownArchitectureError, UsageError
from flashbias_convert.models.pangu import PanguModel
from tests.pangu import SMALL, fields, make, run
from tests.support import assert_parity

onnx = pytest.importorskip("onnx", reason="reading ONNX files needs onnx")

pytestmark = pytest.mark.filterwarnings("ignore")
#: a grid of whole patches: the exporter rounds towards zero what the model rounds up
SIZES = {**SMALL, "depths": (2, 4, 4, 2), "grid": (24, 32)}


def trained() -> PanguModel:
    """All weights differ: the exporter would join equal ones."""
    model = make(**SIZES)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from .published_pangu import write_published

    model = trained()
    path = tmp_path_factory.mktemp("onnx") / "pangu_weather_24.onnx"
    return write_published(model, fields(model, 1), path)


def test_the_file_is_laid_out_as_the_published_ones(published: Path) -> None:
    names = [tensor.name for tensor in onnx.load(published).graph.initializer]
    kinds = {name.rstrip("0123456789") for name in names if name.startswith("onnx")}
    assert kinds == {"onnx::MatMul_", "onnx::Add_"}
    others = [name for name in names if not name.startswith("onnx")]
    assert all(name.startswith("b1.a") for name in others)
    ends = {name.partition(".a")[2].lstrip("0123456789") for name in others}
    assert ends == {".weight", ".bias", ".fc1.bias", ".fc2.bias"}


def test_every_weight_is_read_under_its_name(published: Path) -> None:
    found, meant = read_checkpoint(published).tensors, trained().state_dict()
    assert found.keys() == meant.keys()
    assert all(torch.equal(found[key], value) for key, value in meant.items())


def test_the_model_computes_what_onnxruntime_does(published: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="ONNX files are run by onnxruntime")
    session = runtime.InferenceSession(published, providers=["CPUExecutionProvider"])
    model = open_model(published, arch="pangu", arch_args=SIZES).model
    assert isinstance(model, PanguModel)
    inputs = fields(model, 1)
    fed = {e.name: x.numpy() for e, x in zip(session.get_inputs(), inputs, strict=True)}
    out = torch.cat([torch.from_numpy(o).flatten() for o in session.run(None, fed)])
    assert_parity(run(model, inputs), out, run(copy.deepcopy(model).double(), inputs))


def test_it_is_converted_like_any_other_checkpoint(published: Path, tmp_path: Path) -> None:
    options = ["--arch", "pangu", "--arch-args", json.dumps(SIZES), "--method", "exact"]
    output = tmp_path / "out.safetensors"
    assert run_program([str(published), *options, "--force-all", "-o", str(output), "-q"]) == 0
    converted = load_model(output)
    inputs = fields(trained(), 1)
    plain = trained()
    truth = run(copy.deepcopy(plain).double(), inputs)
    assert_parity(run(converted, inputs), run(plain, inputs), truth)
    assert unpatch_model(converted) == sum(SIZES["depths"])


def test_other_sizes_than_the_published_ones_must_be_given(published: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match=r"of other sizes.*--arch pangu --arch-args"):
        identify(read_checkpoint(published))


def test_the_published_sizes_are_known() -> None:
    from flashbias_convert.checkpoint import Architecture, build_model
    from flashbias_convert.checkpoint.signature import candidates

    tensors = build_model(Architecture("flashbias", "pangu"), "meta").state_dict()
    assert [str(arch) for arch in candidates(tensors)] == ["flashbias:pangu"]


# -- files that are something else ---------------------------------------------------------


def edited(published: Path, folder: Path, edit: Any) -> Path:
    model = onnx.load(published)
    edit(model.graph)
    onnx.save(model, folder / "x.onnx")
    return folder / "x.onnx"


def without(prefix: str) -> Any:
    def drop(graph: Any) -> None:
        first = next(t for t in graph.initializer if t.name.startswith(prefix))
        graph.initializer.remove(first)

    return drop


def with_more(name: str, tensor: Tensor) -> Any:
    def add(graph: Any) -> None:
        graph.initializer.append(onnx.numpy_helper.from_array(tensor.numpy(), name))

    return add


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("onnx::Add_"), r"11 position biases for 4 fine and 8 coarse blocks"),
        (without("onnx::MatMul_"), r"position biases for|there is no matrix"),
        (without("b1.a1.weight"), r"b1\.a1 has \['bias'\], not the \['bias', 'weight'\]"),
        (with_more("b1.a999.weight", torch.ones(2)), r"b1\.a999 comes after the last layer"),
        (with_more("onnx::MatMul_99999", torch.ones(2, 5)), r"a matrix .* comes after the last"),
        (lambda graph: graph.ClearField("initializer"), r"0 position biases"),
    ],
)
def test_other_layouts_are_refused(
    published: Path, tmp_path: Path, edit: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s)layout of Pangu-Weather.*{message}") as caught:
        read_checkpoint(edited(published, tmp_path, edit))
    assert "\n" not in str(caught.value)


def test_other_constants_are_left_out_and_told(published: Path, tmp_path: Path) -> None:
    mask = with_more("onnx::Add_1", torch.zeros(1, 4, 1, 24, 24))  # one for all heads
    found = read_checkpoint(edited(published, tmp_path, mask))
    assert found.tensors.keys() == trained().state_dict().keys()
    assert "left out 1 constants of the graph that are no weights" in found.notes


def test_tensors_in_other_files_are_not_followed(published: Path, tmp_path: Path) -> None:
    model = onnx.load(published)
    onnx.save(model, tmp_path / "x.onnx", save_as_external_data=True, size_threshold=0)
    with pytest.raises(CheckpointError, match="keeps its tensors in other files"):
        read_checkpoint(tmp_path / "x.onnx")


def test_damage_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"this is no graph")
    with pytest.raises(CheckpointError, match=r"x\.onnx is damaged or no ONNX file") as caught:
        convert_checkpoint(tmp_path / "x.onnx")
    assert "\n" not in str(caught.value)


def test_without_the_package_it_is_named(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"needs the package onnx.*flashbias-convert\[onnx\]"):
        read_checkpoint(published)
