"""Compare a converted model with its original, in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..inputs import as_inputs
from ..inspection import refuse_wrapped
from ..patched_attention import PatchedAttention
from ..plan import Plan
from .placing import device_of, dtype_name, dtype_of, placed, wider
from .result import Comparison, Mode, Verification
from .run import Run

Progress = Callable[[int], None]


def verify_model(
    original: nn.Module,
    converted: nn.Module,
    inputs: Any,
    *,
    plan: Plan | None = None,
    labels: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    max_difference: float | None = None,
    min_agreement: float | None = None,
    notes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Verification:
    """The same inputs through both models, site by site and end to end.

    Beside every difference stands what rounding alone does: the original in the dtype in use
    against itself in a wider one (float64 for float32, float32 for half precision). Where all
    terms are exact, the converted model may be off by at most twice that, plus one unit in the
    last place of the largest value (in the root mean square: of that of all values). Where terms
    were truncated, differences are reported, and judged by the limits that are given. Both models
    are as before afterwards.

    Args:
        original: not patched, in evaluation mode.
        converted: patched, in evaluation mode, with modules of the same names.
        inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, a list or another
            iterable of such calls, or `Inputs`; a tuple is always one call.
        plan: of the conversion; it tells which terms are exact. Without it, every low-rank term
            counts as truncated.
        labels: classes of the samples, int64, for top-1 and top-5.
        dtype: float32, float16 or bfloat16; default that of the original.
        device: where to compare; default that of the original.
        max_difference: largest accepted absolute difference of an output.
        min_agreement: smallest accepted share, in [0, 1], of equal choices of class or token.
        notes: go into the result.
        progress: called with the number of samples after each batch.

    Raises:
        UsageError: models that cannot be compared, an original that fails in this dtype itself, no
            inputs, limits that make no sense, or a smallest agreement for a model without logits.
        StaleTermsError: weights have changed since the conversion.
    """
    started = time.perf_counter()
    _check_limits(max_difference, min_agreement)
    sites = converted_sites(original, converted)
    dtype = dtype or dtype_of(original)
    wide = wider(dtype)
    given = as_inputs(inputs, labels, model=original)
    place = torch.device(device) if device is not None else device_of(original)
    run = Run(
        placed(original, place, dtype),
        placed(original, place, wide),
        placed(converted, place, dtype),
        list(sites),
        (dtype, wide),
        given.task,
    )
    for batch in given.batches:
        run.add(batch)
        if progress is not None:
            progress(run.samples)
    if not run.samples:
        raise UsageError("there are no inputs to compare with")
    exact = {name: is_exact(name, module, plan) for name, module in sites.items()}
    mode: Mode = "exact" if all(exact.values()) else "approximate"
    outputs, compared = run.compared_outputs(mode), run.compared_sites(exact)
    agreement = run.agreement.share()
    reasons = [*_reasons(outputs, "output"), *_reasons(compared, "site")]
    reasons += _misses(outputs, agreement, max_difference, min_agreement)
    return Verification(
        mode=mode,
        reasons=tuple(reasons),
        outputs=outputs,
        sites=compared,
        agreement=agreement,
        own_agreement=run.agreement.own_share(),
        scores={which: scores.to_json() for which, scores in run.scores.items()},
        max_difference=max_difference,
        min_agreement=min_agreement,
        samples=run.samples,
        inputs=given.source,
        dtype=dtype_name(dtype),
        wide_dtype=dtype_name(wide),
        device=str(place),
        notes=(*notes, *given.notes, *run.notes),
        seconds=time.perf_counter() - started,
    )


# -- what is compared ------------------------------------------------------------------------


def _check_limits(max_difference: float | None, min_agreement: float | None) -> None:
    if max_difference is not None and not max_difference >= 0:
        raise UsageError(f"the largest difference must be at least 0, got {max_difference}")
    if min_agreement is not None and not 0 <= min_agreement <= 1:
        raise UsageError(f"the smallest agreement must be in [0, 1], got {min_agreement}")


def converted_sites(original: nn.Module, converted: nn.Module) -> dict[str, PatchedAttention]:
    """Name -> patched module of the converted model."""
    for what, model in (("original", original), ("converted model", converted)):
        refuse_wrapped(model)
        if any(module.training for module in model.modules()):
            raise UsageError(
                f"the {what} is in training mode, in which converted modules run their original "
                "forward",
                "call eval() first",
            )
    if any(isinstance(module, PatchedAttention) for module in original.modules()):
        raise UsageError("the original is patched", "compare with a model that is not")
    sites = {n: m for n, m in converted.named_modules() if isinstance(m, PatchedAttention)}
    if not sites:
        raise UsageError("no module of the converted model is patched", "call patch_model first")
    names = {name for name, _ in original.named_modules()}
    lost = [name for name in sites if name not in names]
    if lost:
        raise UsageError(f"the original has no module {lost[0]!r}", "are these the same model?")
    return sites


def is_exact(name: str, module: PatchedAttention, plan: Plan | None) -> bool:
    site = next((s for s in plan.sites if s.name == name), None) if plan is not None else None
    if site is not None:
        return site.is_exact()
    terms = module.score_bias
    factors = any(term.kind == "low_rank" for term in terms.bias.terms) or terms.builder_modules()
    return not factors and not module.trains_terms


# -- why it fails ----------------------------------------------------------------------------


def _reasons(compared: tuple[Comparison, ...], what: str) -> list[str]:
    failed = [one for one in compared if not one.passed]
    if not failed:
        return []
    first = f"{what} {failed[0].name or '(the model)'}: {failed[0].verdict}: {failed[0].reason}"
    more = f" (and {len(failed) - 1} more {what}s)" if len(failed) > 1 else ""
    return [first + more]


def _misses(
    outputs: tuple[Comparison, ...],
    agreement: float | None,
    max_difference: float | None,
    min_agreement: float | None,
) -> list[str]:
    """Limits that were missed, in words."""
    missed = []
    found = [one.difference.difference_max for one in outputs if one.difference is not None]
    # written so that NaN misses the limit
    if max_difference is not None and not all(value <= max_difference for value in found):
        missed.append(f"outputs differ by {max(found):.4g}, accepted is {max_difference:g}")
    if min_agreement is None:
        return missed
    if agreement is None:
        raise UsageError(
            "the model returns no logits, so there is no agreement to judge",
            "use --max-difference",
        )
    if agreement < min_agreement:
        missed.append(f"agreement is {agreement:.4%}, accepted is {min_agreement:.4%}")
    return missed
