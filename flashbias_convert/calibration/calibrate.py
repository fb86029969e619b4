"""Plan a model by the effect of its terms on real inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import UsageError
from ..inputs import Batch, as_inputs, running
from ..inspection import inspect_model
from ..patching import apply_plan
from ..plan import Plan, SitePlan
from ..shares import each, own
from ..swap import restored
from .alternatives import Form, Sums, forms_of, squares_of, with_errors, work_of
from .capture import capture_calls
from .search import Alternatives, Search, outputs_of, relative, squares

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup


def calibrate_model(
    model: nn.Module,
    inputs: Any,
    *,
    max_output_error: float = 0.01,
    max_rank: int | None = None,
    backend: str = "auto",
    group: ProcessGroup | None = None,
    **options: Any,
) -> Plan:
    """Choose terms by their effect on the outputs, not by energy alone; nothing is changed.

    For every head the bias is tried as nothing, at the ranks that kernels compute with anyway, and
    exactly, and the change of the attention outputs is measured on the calls that the inputs
    cause. One bound on that change holds for all heads; it is made as large as the change of the
    model's outputs allows. So heads that matter little get cheap terms.

    Args:
        model: not patched, or patched (it is planned anew), in evaluation mode.
        inputs: see `verify_model`; a few dozen samples suffice. Batches made by ``x.split(32)`` are
            passed as a list: a tuple is one call.
        max_output_error: largest root mean square change of the model's outputs (logits where
            there are any), relative to their own, in (0, 1].
        max_rank: cap on the rank.
        backend: see `flashbias_attention`.
        group: processes that share sites and batches out, see `inspect_model`; each has the same
            model and the same inputs.
        **options: `include`, `exclude`, `recipes`, `tokens`, `target`, `progress`: see
            `inspect_model`.

    Returns:
        A plan for `apply_plan`. Sites without a decomposed bias are as planned with "exact". All
        sites are converted, those that `auto` would leave alone, too: `exclude` them.

    Raises:
        UsageError: no inputs, inputs that the model does not take, or a limit that makes no sense.
        CalibrationError: even exact terms exceed the limit.
    """
    if not 0.0 < max_output_error <= 1.0:
        raise UsageError(f"max_output_error must be in (0, 1], got {max_output_error}")
    plan = inspect_model(model, method="exact", force_all=True, group=group, **options)
    batches = [_as_here(batch, model) for batch in as_inputs(inputs, model=model).batches]
    if not batches:
        raise UsageError("there are no inputs to calibrate with")
    recipes = options.get("recipes", ())
    with restored(model, always=True):
        apply_plan(model, plan, recipes=recipes, backend=backend)
        known = _alternatives(model, plan, batches, max_rank, group)
        here = own(len(batches), group)
        reference = {at: outputs_of(model, [batches[at]])[0] for at in here}

        def difference(allowed: float) -> float:
            tried = _with(plan, known, allowed, math.nan)
            apply_plan(model, tried, recipes=recipes, backend=backend)

            def change(at: int) -> tuple[float, float]:
                return squares(outputs_of(model, [batches[at]])[0], reference[at])

            return relative(each([partial(change, at) for at in range(len(batches))], group))

        search = Search(known, difference, max_output_error)
        allowed = search.run()
    done = _with(plan, known, allowed, search.tried[allowed])
    settled = dataclasses.replace(
        plan.options, method="auto", max_rank=max_rank, max_output_error=max_output_error
    )
    return dataclasses.replace(done, options=settled)


def _alternatives(
    model: nn.Module,
    plan: Plan,
    batches: Sequence[Batch],
    max_rank: int | None,
    group: ProcessGroup | None,
) -> list[Alternatives]:
    """The forms of every decomposed site of a patched model, and what they change in its calls."""
    sites = [site for site in plan.patched if site.decisions]

    def forms(site: SitePlan) -> list[Form]:
        found = forms_of(site, max_rank)
        return found if group is None else [form.to("cpu") for form in found]

    found = each([partial(forms, site) for site in sites], group, list(map(work_of, sites)))
    if group is not None:  # results are sent as tensors of the CPU
        here = next(model.parameters()).device
        found = [[form.to(here) for form in some] for some in found]

    def changes(batch: Batch) -> list[Sums]:
        with running(model):
            calls = capture_calls(model, [site.name for site in sites], [batch])
        return [squares_of(s, own, calls[s.name]) for s, own in zip(sites, found, strict=True)]

    sums = each([partial(changes, batch) for batch in batches], group)
    return [
        Alternatives(site, with_errors(some, [batch[at] for batch in sums]))
        for at, (site, some) in enumerate(zip(sites, found, strict=True))
    ]


def _with(plan: Plan, known: list[Alternatives], allowed: float, difference: float) -> Plan:
    planned = {each.site.name: each.planned(allowed, difference) for each in known}
    return dataclasses.replace(plan, sites=[planned.get(s.name, s) for s in plan.sites])


def _as_here(batch: Batch, model: nn.Module) -> Batch:
    parameter = next(model.parameters())
    return batch.to(parameter.device, parameter.dtype)
