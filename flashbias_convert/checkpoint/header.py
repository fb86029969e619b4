"""The plan in the header of a converted file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError, UsageError
from ..plan import Plan

#: what the entries of a conversion begin with; a file has others of its source
_OWN = "flashbias_convert."
PLAN_KEY = "flashbias_convert.plan"
#: names of the shards that are the input's own files, whose headers say nothing of a plan
LINKED_KEY = "flashbias_convert.linked"
#: name of a tensor in the file -> its name in the model, where they differ
NAMES_KEY = "flashbias_convert.names"
#: names in the files of tensors that are neither weights of the model nor terms
UNUSED_KEY = "flashbias_convert.unused"
TIED_KEY = "flashbias_convert.tied"
VERSION_KEY = "flashbias_convert.version"


def own_entries(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a conversion wrote into a header."""
    return {key: text for key, text in metadata.items() if key.startswith(_OWN)}


def other_entries(metadata: Mapping[str, str]) -> dict[str, str]:
    """What no conversion wrote into a header."""
    return {key: text for key, text in metadata.items() if not key.startswith(_OWN)}


def plan_of(metadata: Mapping[str, str]) -> Plan | None:
    """The plan in the metadata of a header, or None if there is none.

    Raises:
        CheckpointError: a plan that is damaged or of a newer format.
    """
    text = metadata.get(PLAN_KEY)
    if text is None:
        return None
    try:
        return Plan.from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):  # options that this version does not know
            raise CheckpointError(f"the plan cannot be used: {error}") from error
        raise CheckpointError(f"the plan in the header is not JSON: {error}") from error


def require_plan(metadata: Mapping[str, str], path: Path) -> Plan:
    """Like `plan_of`, but a file without a plan is an error."""
    plan = plan_of(metadata)
    if plan is None:
        raise CheckpointError(
            f"{path} is not a converted checkpoint: its header holds no plan",
            f"convert it: flashbias-convert {path}",
        )
    return plan


def linked_of(metadata: Mapping[str, str]) -> frozenset[str]:
    """Names of the shards that are the input's own files."""
    try:
        linked = json.loads(metadata.get(LINKED_KEY, "[]"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the list of linked shards is not JSON: {error}") from error
    if not isinstance(linked, list):
        raise CheckpointError("the list of linked shards is damaged")
    return frozenset(name for name in linked if isinstance(name, str))


def tied_of(metadata: Mapping[str, str]) -> dict[str, str]:
    """Names of tied tensors that are stored once: alias -> stored name."""
    try:
        tied = json.loads(metadata.get(TIED_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the list of tied tensors is not JSON: {error}") from error
    if not isinstance(tied, dict):
        raise CheckpointError("the list of tied tensors is damaged")
    return {str(alias): str(stored) for alias, stored in tied.items()}
