"""The plan of a converted checkpoint, without its weights."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnknownArchitectureError
from ..plan import Plan
from .header import plan_of, require_plan
from .identify import identify
from .kept_terms import plan_of_terms, split_terms
from .read import read_checkpoint, read_metadata


def read_plan(path: str | Path) -> Plan:
    """The plan of a converted file or folder.

    It is in the header. Where a patched model was saved in another way, it is what the terms in
    the state dict say: what is patched, but not why.

    Raises:
        CheckpointError: missing, damaged or not converted.
    """
    path = Path(path)
    metadata = read_metadata(path)
    if plan_of(metadata) is not None:
        return require_plan(metadata, path)
    checkpoint = read_checkpoint(path)
    _, terms = split_terms(checkpoint.tensors)
    if not terms:
        return require_plan(metadata, path)
    plan = plan_of_terms(terms, path)
    if checkpoint.config is not None:
        try:
            plan.arch = identify(checkpoint).to_json()
        except UnknownArchitectureError:  # a config of something else
            plan.arch = None
    return plan
