"""Whether what was timed computed the right thing: a fast row with wrong outputs is no fast row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import flashbias_attention
from ..attention.eager import visible_keys
from ..inputs import Batch
from ..verification.difference import Accumulator, Difference
from ..verification.outputs import tensors_of
from .calls import AttentionCall
from .peers import plain_attention

#: cells of a score matrix in float64 that a reference may take: heads beyond that are not compared
_MOST_CELLS = 2**26

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Judgement:
    """What the outputs of a row came to.

    Attributes:
        passed: whether they are what they must be, as far as that is known.
        verdict: in a few words.
        reason: why they are not; "" if they are.
        difference_max, difference_rms: None where they could not be compared.
    """

    passed: bool
    verdict: str
    reason: str = ""
    difference_max: float | None = None
    difference_rms: float | None = None


@dataclass(frozen=True, eq=False)
class Reference:
    """What outputs are compared with.

    Attributes:
        plain: of a model in eager mode, in the dtype in use.
        wide: of the same model in the wider dtype; None if that could not be run.
        problem: why not.
    """

    plain: Outputs
    wide: Outputs | None = None
    problem: str = ""


def first_sample(batch: Batch) -> Batch:
    """The first sample of a batch: outputs are compared on it alone."""

    def cut(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch.size
        return value[:1] if whole else value

    args = tuple(cut(value) for value in batch.args)
    kwargs = {name: cut(value) for name, value in batch.kwargs.items()}
    return dataclasses.replace(batch, args=args, kwargs=kwargs, size=1, labels=None)


def outputs_of(output: Any, size: int) -> dict[str, Tensor]:
    """Copies, on the CPU, of what a model returned for the first of `size` samples."""
    found = {}
    for name, tensor in tensors_of(output).items():
        cut = tensor[:1] if tensor.dim() and tensor.shape[0] == size else tensor
        found[name] = cut.detach().to("cpu", copy=True)
    return found


def run_eager(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The outputs for one sample."""
    return outputs_of(model(*batch.args, **batch.kwargs), batch.size)


def judge_model(
    found: Outputs, original: Reference, own: Reference, dtype: torch.dtype, *, approximate: bool
) -> Judgement:
    """Compare the outputs of a row.

    Args:
        found: of the row.
        original: of the original model: differences are from its plain outputs.
        own: of the model that the row must agree with: the original, or the converted one where
            terms were truncated.
        dtype: in use.
        approximate: whether `own` is not the original.
    """
    shown = _differences(found, original, dtype)
    if isinstance(shown, str):
        return Judgement(False, "not comparable", shown)
    largest = max(d.difference_max for d in shown)
    rms = max(d.difference_rms for d in shown)
    bad = next((d.not_finite for d in shown if d.not_finite), "")
    if bad:
        what = bad.replace("the converted model", "this row")
        return Judgement(False, "not finite", f"NaN or infinity in {what}")
    if own.wide is None:
        return Judgement(True, f"not judged: {own.problem}", "", largest, rms)
    judged = _differences(found, own, dtype)
    assert not isinstance(judged, str)
    worst = next((d for d in judged if not d.within_rounding), None)
    if worst is not None:
        return Judgement(False, "exceeds rounding", _exceeds(worst), largest, rms)
    return Judgement(True, "approximate" if approximate else "within rounding", "", largest, rms)


def _exceeds(found: Difference) -> str:
    return (
        f"error {found.error_max:.3g} (rms {found.error_rms:.3g}), rounding allows "
        f"{found.allowed_max:.3g} (rms {found.allowed_rms:.3g})"
    )


def _differences(found: Outputs, against: Reference, dtype: torch.dtype) -> list[Difference] | str:
    """One per output, or why they cannot be compared."""
    differences = []
    for name, plain in against.plain.items():
        own = found.get(name)
        if own is None or own.shape != plain.shape:
            what = "nothing" if own is None else f"a tensor of shape {tuple(own.shape)}"
            return f"it returns {what} as {name!r}"
        collected = Accumulator(dtype)
        wide = plain if against.wide is None else against.wide[name]
        collected.add(plain, own, wide)
        differences.append(collected.result())
    return differences or "the original returns no tensor of floating point"


# -- attention -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionReference:
    """What every row of one attention call must compute, for some of its entries and heads.

    Attributes:
        call: the part of the call that is looked at.
        heads: which heads that is.
        truth: in float64.
        plain: the formula in the dtype of the call.
        nothing: boolean, True for queries that have no key to attend to, such as padding: what
            they get is nobody's business, and ways to compute it differ. None if there are none.
    """

    call: AttentionCall
    heads: list[int]
    truth: Tensor
    plain: Tensor
    nothing: Tensor | None = None

    @classmethod
    def of(cls, call: AttentionCall) -> AttentionReference:
        """Compute the reference for as much of a call as memory allows, one head at least."""
        first = call.of_first_entry()
        total, n, m = first.q.shape[-3], first.q.shape[-2], first.k.shape[-2]
        entries = first.q[..., 0, 0, 0].numel()
        count = max(1, min(total, _MOST_CELLS // max(1, entries * n * m)))
        heads = [i * total // count for i in range(count)]
        part = first.of_heads(heads)
        args = part.args
        truth = flashbias_attention(
            part.q.double(),
            part.k.double(),
            part.v.double(),
            part.bias,
            scale=args.scale,
            causal=args.causal,
            query_start=args.query_start,
            key_mask=args.key_mask,
            cosine=args.cosine,
            backend="eager",
        )
        visible = visible_keys(part.q, part.k, args)
        nothing = None if visible is None else ~visible.any(-1, keepdim=True)
        return cls(part, heads, truth, plain_attention(part), nothing)

    def judge(self, out: Tensor) -> Judgement:
        """Compare what a row returned for the whole call, (*batch, H, N, Dv)."""
        outermost = self.truth.shape[0] if self.truth.dim() > 3 else None
        part = (out if outermost is None else out[:outermost])[..., self.heads, :, :]
        if part.shape != self.truth.shape:
            return Judgement(False, "not comparable", f"it returns shape {tuple(out.shape)}")
        collected = Accumulator(self.call.q.dtype)
        collected.add(*(self._seen(x) for x in (self.plain, part, self.truth)))
        found = collected.result()
        if found.not_finite:
            what = found.not_finite.replace("the converted model", "this row")
            return Judgement(False, "not finite", f"NaN or infinity in {what}")
        numbers = (found.error_max, found.error_rms)
        if not found.within_rounding:
            return Judgement(False, "exceeds rounding", _exceeds(found), *numbers)
        return Judgement(True, "within rounding", "", *numbers)

    def _seen(self, x: Tensor) -> Tensor:
        return x if self.nothing is None else x.masked_fill(self.nothing, 0.0)
