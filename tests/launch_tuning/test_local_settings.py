"""The file of launch settings: what is written is read, and a bad one is told, not used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from flashbias_convert.attention import local_settings
from flashbias_convert.attention.launch_table import launch_settings
from flashbias_convert.attention.local_settings import (
    parse_settings,
    settings_file,
    settings_for,
    write_settings,
)
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape

SHAPE = LaunchShape(n=576, d=32, dv=32, columns=16, half=True, terms=("phi_q", "phi_k"))
OWN = LaunchSettings(128, 32, 8, 4, 128)
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files of these tests alone, and a card that is not there."""
    monkeypatch.setenv(local_settings.FOLDER_VARIABLE, str(tmp_path))
    local_settings._measured.cache_clear()
    with mock.patch.object(torch.cuda, "get_device_name", return_value=CARD):
        yield tmp_path
    local_settings._measured.cache_clear()


def test_without_a_file_the_rule_holds() -> None:
    for device in ("cpu", "cuda"):
        assert settings_for(torch.device(device), SHAPE) == launch_settings(SHAPE)


def test_what_is_written_is_used_on_that_card_alone() -> None:
    write_settings(settings_file(CARD), {SHAPE.rounded(): OWN}, {"card": CARD})
    assert settings_for(torch.device("cuda"), SHAPE) == OWN
    assert settings_for(torch.device("cuda"), replace(SHAPE, terms=("phi_k", "phi_q"))) == OWN
    other = replace(SHAPE, n=577)
    assert settings_for(torch.device("cuda"), other) == launch_settings(other)
    assert settings_for(torch.device("cpu"), SHAPE) == launch_settings(SHAPE)
    with mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A100"):
        assert settings_for(torch.device("cuda"), SHAPE) == launch_settings(SHAPE)


def test_long_sequences_share_settings_up_to_the_next_power_of_two() -> None:
    classes = [replace(SHAPE, n=n).rounded() for n in (2049, 4096, 4097)]
    assert classes[0] == classes[1] != classes[2]


def test_settings_do_not_change_within_a_process() -> None:
    file = settings_file(CARD)
    write_settings(file, {SHAPE.rounded(): OWN}, {})
    first = settings_for(torch.device("cuda"), SHAPE)
    write_settings(file, {SHAPE.rounded(): LaunchSettings(64, 32, 4, 2)}, {})
    assert settings_for(torch.device("cuda"), SHAPE) == first == OWN


def test_other_shapes_stay_when_more_are_written() -> None:
    file = settings_file(CARD)
    other = replace(SHAPE, n=144).rounded()
    write_settings(file, {other: OWN}, {})
    write_settings(file, {SHAPE.rounded(): OWN}, {})
    assert parse_settings(file.read_text()) == {other: OWN, SHAPE.rounded(): OWN}
    assert [f.name for f in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        json.dumps({"version": 99, "settings": []}),
        json.dumps({"version": 1}),
        json.dumps({"version": 1, "settings": [{"shape": {"n": 1}, "settings": {}}]}),
        json.dumps(
            {
                "version": 1,
                "settings": [
                    {
                        "shape": {**vars(SHAPE), "terms": []},
                        "settings": {**vars(OWN), "block_m": 48},
                    }
                ],
            }
        ),
        json.dumps(
            {
                "version": 1,
                "settings": [
                    {
                        "shape": {**vars(SHAPE), "terms": []},
                        "settings": {**vars(OWN), "tiles": 1},  # that are no longer known
                    }
                ],
            }
        ),
    ],
)
def test_a_bad_file_is_told_and_not_used(content: str) -> None:
    settings_file(CARD).write_text(content)
    with pytest.warns(UserWarning, match="are not used"):
        assert settings_for(torch.device("cuda"), SHAPE) == launch_settings(SHAPE)
    write_settings(settings_file(CARD), {SHAPE.rounded(): OWN}, {})
    assert parse_settings(settings_file(CARD).read_text()) == {SHAPE.rounded(): OWN}


@pytest.mark.parametrize("problem", [PermissionError("no"), RuntimeError("no home directory")])
def test_without_a_folder_that_can_be_read_the_rule_holds(problem: Exception) -> None:
    with mock.patch.object(local_settings, "settings_file", side_effect=problem):
        assert settings_for(torch.device("cuda"), SHAPE) == launch_settings(SHAPE)
    with mock.patch.object(Path, "read_text", side_effect=problem):
        local_settings._measured.cache_clear()
        assert settings_for(torch.device("cuda"), SHAPE) == launch_settings(SHAPE)


def test_a_named_folder_needs_no_home(tmp_path: Path) -> None:
    with mock.patch.object(Path, "home", side_effect=RuntimeError("no home directory")):
        assert settings_file(CARD).parent == tmp_path
