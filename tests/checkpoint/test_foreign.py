"""Checkpoints of other training programs: weights and configs come in, code never does."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import json
import logging
import pathlib
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flashbias_convert.checkpoint import identify, open_model, read_checkpoint
from flashbias_convert.checkpoint.inert import DataObject, plain
from flashbias_convert.checkpoint.open import OpenedModel
from flashbias_convert.errors import CheckpointError, UnknownArchitectureError

from .foreign import installed, write_swin_training
from .models import ARGS, NAME, tiny_model, tiny_weights
from .test_identify import first_authors_layout
from .test_read import WEIGHTS, assert_equal

SWIN_CONFIG = {
    "DATA": {"IMG_SIZE": 32},
    "MODEL": {
        "TYPE": "swinv2",
        "NAME": "mine",
        "NUM_CLASSES": 1000,
        "SWINV2": {
            "PATCH_SIZE": 2,
            "IN_CHANS": 3,
            "EMBED_DIM": 16,
            "DEPTHS": [2, 1],
            "NUM_HEADS": [1, 2],
            "WINDOW_SIZE": 8,
            "MLP_RATIO": 4.0,
            "QKV_BIAS": True,
            "APE": False,
            "PATCH_NORM": True,
            "PRETRAINED_WINDOW_SIZES": [0, 0],
        },
    },
}

# -- Swin's authors ------------------------------------------------------------------------


def test_a_training_checkpoint_of_swins_authors_says_everything(tmp_path: Path) -> None:
    weights = first_authors_layout(tiny_model())
    path = write_swin_training(tmp_path / "ckpt_epoch_299.pth", weights, SWIN_CONFIG)
    assert "yacs" not in sys.modules
    checkpoint = read_checkpoint(path)
    assert checkpoint.extras["config"]["MODEL"]["SWINV2"]["WINDOW_SIZE"] == 8
    assert any("yacs.config.CfgNode were read as plain data" in n for n in checkpoint.notes)
    opened = open_model(path)
    # the number of classes is that of the weights, not that of the config
    assert opened.architecture.args["num_classes"] == 5
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(opened.model(x), tiny_model()(x))


@pytest.mark.parametrize("changes", [{"APE": True}, {"PATCH_NORM": False}])
def test_variants_that_timm_lacks_are_not_guessed(tmp_path: Path, changes: Any) -> None:
    model = {**SWIN_CONFIG["MODEL"], "SWINV2": {**SWIN_CONFIG["MODEL"]["SWINV2"], **changes}}
    config = {**SWIN_CONFIG, "MODEL": model}
    path = write_swin_training(tmp_path / "x.pth", WEIGHTS, config)
    with pytest.raises(UnknownArchitectureError, match="does not say which architecture"):
        identify(read_checkpoint(path))


# -- BasicSR and OpenMMLab -----------------------------------------------------------------


def test_averaged_weights_of_basicsr_come_first(tmp_path: Path) -> None:
    content = {"params": {k: v + 1 for k, v in WEIGHTS.items()}, "params_ema": WEIGHTS}
    torch.save(content, tmp_path / "net_g_latest.pth")
    assert_equal(read_checkpoint(tmp_path / "net_g_latest.pth").tensors, WEIGHTS)
    torch.save({"params": WEIGHTS}, tmp_path / "net_g_5000.pth")
    assert_equal(read_checkpoint(tmp_path / "net_g_5000.pth").tensors, WEIGHTS)


def test_openmmlab_keeps_its_prefixes(tmp_path: Path) -> None:
    keyed = {f"backbone.{k}": v for k, v in WEIGHTS.items()} | {"decode_head.w": torch.ones(1)}
    with (
        installed("mmengine.config.config.ConfigDict", dict) as config_dict,
        installed("mmengine.logging.history_buffer.HistoryBuffer") as buffer,
    ):
        history = buffer()
        history.__dict__["_log_history"] = np.arange(3.0)
        content = {
            "meta": {"cfg": "model = dict(...)", "dataset_meta": config_dict(CLASSES=["a"])},
            "message_hub": {"log_scalars": {"loss": history}},
            "state_dict": keyed,
        }
        torch.save(content, tmp_path / "epoch_12.pth")
    found = read_checkpoint(tmp_path / "epoch_12.pth")
    assert_equal(found.tensors, keyed)
    assert found.extras["meta"]["dataset_meta"]["CLASSES"] == ["a"]
    assert "mmengine" not in sys.modules


# -- Lightning -----------------------------------------------------------------------------


def lightning(weights: dict[str, Tensor], **more: Any) -> dict[str, Any]:
    return {"pytorch-lightning_version": "2.4.0", "epoch": 1, "state_dict": weights, **more}


HYPER = {"model_name": NAME, "lr": 0.1, "num_classes": 5, "img_size": 32}


def test_hyperparameters_name_the_model(tmp_path: Path) -> None:
    weights = {f"net.{k}": v for k, v in tiny_weights().items()}
    with installed("lightning.fabric.utilities.data.AttributeDict", dict) as attributes:
        torch.save(lightning(weights, hyper_parameters=attributes(HYPER)), tmp_path / "x.ckpt")
    found = identify(read_checkpoint(tmp_path / "x.ckpt"))
    assert (found.name, found.args) == (NAME, {"num_classes": 5, "img_size": 32})


def test_hyperparameters_of_omegaconf_are_read_without_it(tmp_path: Path) -> None:
    with (
        installed("omegaconf.dictconfig.DictConfig") as dict_config,
        installed("omegaconf.nodes.AnyNode") as any_node,
    ):

        def node(value: Any) -> Any:
            made = any_node()
            made.__dict__.update(_val=value, _parent=None)
            return made

        config = dict_config()
        config.__dict__["_content"] = {k: node(v) for k, v in HYPER.items()}
        torch.save(lightning(WEIGHTS, hyper_parameters=config), tmp_path / "x.ckpt")
    found = read_checkpoint(tmp_path / "x.ckpt")
    assert plain(found.extras["hyper_parameters"]) == HYPER
    assert identify(found).name == NAME


def test_the_model_is_found_beside_other_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {f"model.net.{k}": v for k, v in tiny_weights().items()}
    others = {"model.scale": torch.ones(1), "loss.weight": torch.ones(5)}
    torch.save(lightning(weights | others), tmp_path / "x.ckpt")
    args = {k: v for k, v in ARGS.items() if k != "num_classes"}
    with caplog.at_level(logging.WARNING, "flashbias_convert"):
        opened = open_model(tmp_path / "x.ckpt", arch=f"timm:{NAME}", arch_args=args)
    assert opened.stored.keys() == tiny_weights().keys()
    assert "took the tensors under 'model.net.'; 2 others" in caplog.text
    assert "loss.weight" in caplog.text and "model.scale" in caplog.text


def open_two(tmp_path: Path, first: str, second: str, other: dict[str, Tensor]) -> OpenedModel:
    """Opened from a file with the tiny weights under one name and others under another."""
    both = {first + k: v for k, v in tiny_weights().items()}
    both |= {second + k: v for k, v in other.items()}
    torch.save(lightning(both), tmp_path / "x.ckpt")
    args = {k: v for k, v in ARGS.items() if k != "num_classes"}
    return open_model(tmp_path / "x.ckpt", arch=f"timm:{NAME}", arch_args=args)


def test_a_student_and_its_teacher_are_not_chosen_between(tmp_path: Path) -> None:
    other = {k: v + 1 if v.is_floating_point() else v for k, v in tiny_weights().items()}
    with pytest.raises(
        CheckpointError, match=r"two such models, under 'student\.net\.' and 'teacher"
    ):
        open_two(tmp_path, "student.net.", "teacher.net.", other)
    with pytest.raises(CheckpointError, match=r"under 'q\.' and 'k\.'"):
        open_two(tmp_path, "model.q.", "model.k.", other)


def test_the_same_model_under_two_names_is_one(tmp_path: Path) -> None:
    opened = open_two(tmp_path, "model.", "backbone.net.", tiny_weights())
    assert all(torch.equal(opened.stored[k], v) for k, v in tiny_weights().items())


def test_another_number_of_classes_is_another_model(tmp_path: Path) -> None:
    other = {k: v[:3] if k.startswith("head.fc") else v for k, v in tiny_weights().items()}
    opened = open_two(tmp_path, "model.", "other.", other)
    assert all(torch.equal(opened.stored[k], v) for k, v in tiny_weights().items())


def test_averaged_weights_beside_others_come_first(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)

    first, second = Net().state_dict(), Net().state_dict()
    keyed = {f"model.{k}": v for k, v in first.items()}
    keyed |= {f"ema_model.{k}": v for k, v in second.items()}
    torch.save(lightning(keyed), tmp_path / "x.ckpt")
    assert_equal(open_model(tmp_path / "x.ckpt", arch=Net).stored, second)


def test_a_whole_lightning_module_can_be_built_too(tmp_path: Path) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

    weights = Module().state_dict()
    torch.save(lightning(weights), tmp_path / "x.ckpt")
    assert_equal(open_model(tmp_path / "x.ckpt", arch=Module).stored, weights)


# -- PhysicsNeMo ---------------------------------------------------------------------------

PANGU = {
    "__name__": "Pangu",
    "__module__": "physicsnemo.models.pangu.pangu",
    "__args__": {"img_size": [721, 1440], "window_size": [2, 6, 12]},
}


def write_mdlus(path: Path, how: str, weights: dict[str, Any], arguments: str) -> Path:
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    members = {"args.json": arguments.encode(), "metadata.json": b"{}"}
    members["model.pt"] = buffer.getvalue()
    if how == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return path
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("how", ["zip", "tar"])
@pytest.mark.parametrize("suffix", [".mdlus", ".pt"])
def test_mdlus_files_are_read_as_data(tmp_path: Path, how: str, suffix: str) -> None:
    weights = {**WEIGHTS, "device_buffer": torch.empty(0)}
    path = write_mdlus(tmp_path / f"Pangu.0.10{suffix}", how, weights, json.dumps(PANGU))
    found = read_checkpoint(path)
    assert_equal(found.tensors, WEIGHTS)
    assert found.extras == PANGU
    assert found.notes == ("saved by physicsnemo.models.pangu.pangu.Pangu",)
    with pytest.raises(UnknownArchitectureError, match=r"pangu\.Pangu, which is not built.*--arch"):
        identify(found)
    assert "physicsnemo" not in sys.modules


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("how", ["zip", "tar"])
def test_code_in_an_mdlus_file_does_not_run(tmp_path: Path, how: str) -> None:
    content = {"a": Malicious(tmp_path / "trap")}
    path = write_mdlus(tmp_path / "x.mdlus", how, content, json.dumps(PANGU))
    with pytest.raises(CheckpointError, match=r"could run code \(builtins.getattr|touch"):
        read_checkpoint(path)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("how", ["zip", "tar"])
@pytest.mark.parametrize("arguments", ["{{", "[1]"])
def test_damaged_mdlus_files_are_one_clear_line(tmp_path: Path, how: str, arguments: str) -> None:
    path = write_mdlus(tmp_path / "x.mdlus", how, WEIGHTS, arguments)
    with pytest.raises(CheckpointError, match=r"x\.mdlus") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_an_archive_that_swells_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.mdlus"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.pt", bytes(10**6))
        archive.writestr("args.json", "{}")
    with pytest.raises(CheckpointError, match=r"model\.pt is larger than its archive"):
        read_checkpoint(path)


# -- classes of others ---------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "beside",
    [
        pathlib.Path("a/b"),
        np.float64(0.5),
        np.arange(3),
        np.array([None, "x"], dtype=object),
        collections.defaultdict(list, {"a": [1]}),
        {"when": datetime.datetime(2026, 1, 1)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_harmless_objects_beside_the_weights_are_data(
    tmp_path: Path, beside: Any, zipped: bool
) -> None:
    content = {"state_dict": WEIGHTS, "best": beside}
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(tmp_path / "x.pth")
    assert_equal(found.tensors, WEIGHTS)
    assert any("were read as plain data" in note for note in found.notes)


def test_a_stand_in_is_only_what_was_in_the_file(tmp_path: Path) -> None:
    torch.save({"state_dict": WEIGHTS, "best": np.float64(0.5)}, tmp_path / "x.pth")
    best = read_checkpoint(tmp_path / "x.pth").extras["best"]
    assert isinstance(best, DataObject) and best.args[1] == np.float64(0.5).tobytes()


@pytest.mark.parametrize("zipped", [True, False])
def test_unknown_classes_are_named_and_nothing_is_loaded(tmp_path: Path, zipped: bool) -> None:
    with installed("somebody.tracker.Tracker") as tracker:
        content = {"state_dict": WEIGHTS, "tracker": tracker(), "path": pathlib.Path("a")}
        torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"\(somebody\.tracker\.Tracker\).*state_dict"):
        read_checkpoint(tmp_path / "x.pth")


def test_what_the_caller_declared_safe_stays_so(tmp_path: Path) -> None:
    content = {"state_dict": WEIGHTS, "args": argparse.Namespace(a=1), "best": np.float64(1)}
    torch.save(content, tmp_path / "x.pth")
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([argparse.Namespace]):
        read_checkpoint(tmp_path / "x.pth")
        assert argparse.Namespace in torch.serialization.get_safe_globals()
    assert set(torch.serialization.get_safe_globals()) == before


def test_weights_that_are_no_tensors_are_not_passed_over(tmp_path: Path) -> None:
    torch.save({"model": {"a": np.ones(3)}}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"holds no tensors.*numpy.* read as plain data"):
        read_checkpoint(tmp_path / "x.pth")
