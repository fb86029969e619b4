"""What the inference kernel would be launched with, found without a launch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from unittest import mock

import torch

from flashbias_convert.attention import launch
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape


class _Seen(Exception):
    """Nothing more is to be learnt of a call: it need not be compiled."""


def apart() -> contextlib.AbstractContextManager[object]:
    """Inside, batch entries of a call share no tiles of a dense bias.

    As beside a mask or a gate, and in cosine attention.
    """
    rule = launch.settings_for

    def settings_for(device: torch.device, shape: LaunchShape) -> LaunchSettings:
        return rule(device, dataclasses.replace(shape, shared=False))

    return mock.patch.multiple(launch, settings_for=settings_for, _PLANS={})


def launched(call: Callable[[], object]) -> tuple[LaunchShape, LaunchSettings]:
    """Shape and settings of the first launch of a call."""
    seen: list[tuple[LaunchShape, LaunchSettings]] = []
    rule = launch.settings_for

    def settings_for(device: torch.device, shape: LaunchShape) -> LaunchSettings:
        seen.append((shape, rule(device, shape)))
        raise _Seen

    instead = mock.patch.multiple(launch, settings_for=settings_for, _PLANS={})
    with instead, contextlib.suppress(_Seen):
        call()
    return seen[0]
