"""The state of a fit in a file, so that an interrupted one goes on."""

from __future__ import annotations

import os
import pickle
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UsageError

_FORMAT = 1


@dataclass
class FitState:
    """What a fit knows after a check.

    Attributes:
        weights: of the networks.
        optimiser: state dict of Adam.
        generator: state of the random numbers, bytes.
        best: weights of the best check.
        best_loss: its loss.
        best_holds: whether it keeps what was asked for.
        idle: checks without progress.
        ended: why the fit ended, or None.
        history: the checks.
    """

    weights: dict[str, Tensor]
    optimiser: dict[str, Any]
    generator: Tensor
    best: dict[str, Tensor]
    best_loss: float
    best_holds: bool
    idle: int
    ended: str | None
    history: list[dict[str, Any]]


def write_state(path: str | Path, identity: dict[str, Any], state: FitState) -> None:
    """Replace the file at `path`, complete or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        torch.save({"format": _FORMAT, "identity": identity, **vars(state)}, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"the state of the fit cannot be written to {path}: {error}"
        ) from error


def read_state(path: str | Path, identity: dict[str, Any]) -> FitState | None:
    """The state in a file, or None if there is none.

    Raises:
        CheckpointError: the file is no such state.
        UsageError: it belongs to another fit.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, dict) or found.pop("format") != _FORMAT:
            raise ValueError("it has another format")
        belongs_to = found.pop("identity")
        state = FitState(**found)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError,
            pickle.UnpicklingError) as error:  # fmt: skip
        raise CheckpointError(
            f"{path} is not the state of a fit: {error}", "delete it to begin anew"
        ) from error
    if belongs_to != identity:
        differ = [key for key in identity if belongs_to.get(key) != identity[key]]
        raise UsageError(
            f"{path} belongs to another fit: its {' and '.join(differ)} differ",
            "delete it, or choose another file",
        )
    return state
