"""Walk a model, find where it adds biases, and plan what to do with each; nothing is changed."""

from .finding import find_site, owner_of, refuse_wrapped, shared_owner
from .groups import together
from .inspect import inspect_model
from .planning import NEEDS_FIT, pair_site, reason_against
from .surroundings import leave_no_trace, library_versions

__all__ = [
    "NEEDS_FIT",
    "find_site",
    "inspect_model",
    "leave_no_trace",
    "library_versions",
    "owner_of",
    "pair_site",
    "reason_against",
    "refuse_wrapped",
    "shared_owner",
    "together",
]
