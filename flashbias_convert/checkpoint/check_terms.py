"""Whether the terms that a plan describes are the tensors in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..builders import check_entry
from ..errors import CheckpointError
from ..plan import Plan, SitePlan
from ..seals import COLUMNS
from ..swap import SUBMODULE
from ..terms import ScoreBias

#: what terms of a damaged plan raise when they are built
DAMAGE = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)


def check_terms(plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the terms of the plan are the tensors in the file.

    This comes before anything of the plan's sizes is allocated.
    """
    for site in plan.patched:
        for key, info in term_tensors(site):
            tensor = tensors.get(key)
            if tensor is None:
                raise CheckpointError(f"the plan names {key}, which the file lacks")
            found = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            if found != info:
                raise CheckpointError(f"the plan says that {key} is {info}, the file has {found}")
        _check_made_from(site, tensors)


def _check_made_from(site: SitePlan, tensors: Mapping[str, Tensor]) -> None:
    """What the terms were made from, where the file says it: a row of hashes for each tensor."""
    key = f"{_prefix(site)}.made_from"
    rows = tensors.get(key)
    if rows is None:  # files of earlier releases
        return
    if rows.dim() != 2 or rows.shape[1] != COLUMNS or rows.dtype != torch.int64:
        raise CheckpointError(
            f"{key} must be int64 of shape (tensors, {COLUMNS}), the file has {rows.dtype} of "
            f"shape {tuple(rows.shape)}"
        )


def term_keys(site: SitePlan) -> list[str]:
    """Keys of everything that a site may add to a file.

    Raises:
        CheckpointError: the plan is damaged.
    """
    return [*(key for key, _ in term_tensors(site)), f"{_prefix(site)}.made_from"]


def term_tensors(site: SitePlan) -> list[tuple[str, Any]]:
    """Key, and shape and dtype as JSON, of every tensor that a site adds to every file.

    Raises:
        CheckpointError: the plan is damaged.
    """
    prefix = _prefix(site)
    try:
        if not site.spec:
            return []
        tensors = [
            (f"{prefix}.{term['name']}.{name}", info)
            for term in site.spec["terms"]
            for name, info in term["tensors"].items()
        ]
        for entry in site.spec.get("builder_modules", ()):
            check_entry(entry)
            tensors += [(f"{prefix}.{entry['name']}.{k}", i) for k, i in entry["tensors"].items()]
        layout = {"shape": [len(ScoreBias.layout(site.spec).encode())], "dtype": "uint8"}
        return [*tensors, (f"{prefix}.layout", layout)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the plan of {site.name!r} is damaged: {error!r}") from error


def _prefix(site: SitePlan) -> str:
    return f"{site.name}.{SUBMODULE}" if site.name else SUBMODULE
