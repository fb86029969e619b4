"""Convert pretrained models with attention biases to FlashBias attention.

The public names are imported when they are first used, so that importing the package is quick
and loads no model library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .attention import PreparedBias, flashbias_attention
    from .attention_interface import register_attention
    from .benchmark import BenchmarkReport, benchmark_model
    from .calibration import CalibrationError, calibrate_model
    from .checkpoint import load_model, save_model
    from .errors import (
        CheckpointError,
        DecompositionError,
        FlashBiasError,
        NotFiniteError,
        NothingToConvertError,
        StaleTermsError,
        UnknownArchitectureError,
        UnsupportedTermError,
        UsageError,
        VerificationError,
    )
    from .factors_once import factors_once
    from .fitting import fit_sites
    from .freshness import check_model
    from .huggingface import FlashBiasConfig
    from .inspection import inspect_model
    from .options import DecomposeOptions
    from .patched_attention import PatchedAttention
    from .patching import apply_plan, freeze_terms, patch_model, patched, unpatch_model
    from .plan import Plan, SitePlan
    from .probing import Probe, SiteProbe, probe_model
    from .recipe import Description, Observed, Recipe, Site, UnsupportedSite, load_recipe_file
    from .terms import (
        Alibi,
        Axial,
        Dense,
        Diagonal,
        KeyBias,
        Lookup,
        LowRank,
        Regions,
        RelativeTable,
        ScoreBias,
        Term,
    )
    from .verification import Verification, verify_files, verify_model

_MODULES = {
    "attention": ("PreparedBias", "flashbias_attention"),
    "attention_interface": ("register_attention",),
    "benchmark": ("BenchmarkReport", "benchmark_model"),
    "calibration": ("CalibrationError", "calibrate_model"),
    "checkpoint": ("load_model", "save_model"),
    "errors": (
        "CheckpointError",
        "DecompositionError",
        "FlashBiasError",
        "NotFiniteError",
        "NothingToConvertError",
        "StaleTermsError",
        "UnknownArchitectureError",
        "UnsupportedTermError",
        "UsageError",
        "VerificationError",
    ),
    "factors_once": ("factors_once",),
    "fitting": ("fit_sites",),
    "freshness": ("check_model",),
    "huggingface": ("FlashBiasConfig",),
    "inspection": ("inspect_model",),
    "options": ("DecomposeOptions",),
    "patched_attention": ("PatchedAttention",),
    "patching": ("apply_plan", "freeze_terms", "patch_model", "patched", "unpatch_model"),
    "plan": ("Plan", "SitePlan"),
    "probing": ("Probe", "SiteProbe", "probe_model"),
    "recipe": (
        "Description",
        "Observed",
        "Recipe",
        "Site",
        "UnsupportedSite",
        "load_recipe_file",
    ),
    "terms": (
        "Alibi",
        "Axial",
        "Dense",
        "Diagonal",
        "KeyBias",
        "Lookup",
        "LowRank",
        "Regions",
        "RelativeTable",
        "ScoreBias",
        "Term",
    ),
    "verification": ("Verification", "verify_files", "verify_model"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Alibi",
    "Axial",
    "BenchmarkReport",
    "CalibrationError",
    "CheckpointError",
    "DecomposeOptions",
    "DecompositionError",
    "Dense",
    "Description",
    "Diagonal",
    "FlashBiasConfig",
    "FlashBiasError",
    "KeyBias",
    "Lookup",
    "LowRank",
    "NotFiniteError",
    "NothingToConvertError",
    "Observed",
    "PatchedAttention",
    "Plan",
    "PreparedBias",
    "Probe",
    "Recipe",
    "Regions",
    "RelativeTable",
    "ScoreBias",
    "Site",
    "SitePlan",
    "SiteProbe",
    "StaleTermsError",
    "Term",
    "UnknownArchitectureError",
    "UnsupportedSite",
    "UnsupportedTermError",
    "UsageError",
    "Verification",
    "VerificationError",
    "__version__",
    "apply_plan",
    "benchmark_model",
    "calibrate_model",
    "check_model",
    "factors_once",
    "fit_sites",
    "flashbias_attention",
    "freeze_terms",
    "inspect_model",
    "load_model",
    "load_recipe_file",
    "patch_model",
    "patched",
    "probe_model",
    "register_attention",
    "save_model",
    "unpatch_model",
    "verify_files",
    "verify_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
