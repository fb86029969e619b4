"""What the inference kernel would be launched with, found without a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import torch

from flashbias_convert.attention import launch
from flashbias_convert.attention.tuning import LaunchSettings, LaunchShape


class _Seen(Exception):
    """Nothing more is to be learnt of a call: it need not be compiled."""


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
