"""The same batches through the original, the original in a wider dtype, and the converted model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FlashBiasError, UsageError
from ..inputs import Batch, running
from ..inputs.batch import Task
from .difference import Accumulator
from .outputs import logits_name
from .placing import dtype_name
from .recording import Record, run_recorded
from .result import Comparison, Mode, compare
from .scores import Agreement, Scores, label_problem, sees_the_future


class Run:
    """Collects everything that is compared.

    Args:
        plain: the original in the dtype in use.
        wide: the original in a wider dtype.
        converted: in the dtype in use.
        sites: names of the converted modules.
        task: what labels of the batches are.
    """

    def __init__(
        self,
        plain: nn.Module,
        wide: nn.Module,
        converted: nn.Module,
        sites: list[str],
        dtypes: tuple[torch.dtype, torch.dtype],
        task: Task | None,
    ) -> None:
        self._models = {"plain": plain, "wide": wide, "converted": converted}
        self._sites, self._dtypes, self._task = sites, dtypes, task
        self._outputs: dict[str, Accumulator] = {}
        self._inner: dict[str, Accumulator] = {name: Accumulator(dtypes[0]) for name in sites}
        self._wrong: dict[str, str] = {}  # output or site -> why it cannot be compared
        self.calls = dict.fromkeys(sites, 0)
        self.last_call: dict[str, int] = {}
        self.agreement = Agreement()
        self.scores: dict[str, Scores] = {}
        self.logits: str | None = None
        self.notes: list[str] = []
        self.samples = 0

    def add(self, batch: Batch) -> None:
        """Take one batch through all three models."""
        device = next(self._models["plain"].parameters()).device
        rounded = batch.to(device, self._dtypes[0])  # all three see these values
        with running(self._models["wide"]):
            as_wide = rounded.to(dtype=self._dtypes[1])
            wide = run_recorded(self._models["wide"], as_wide, self._sites)
        with self._blaming_the_original():
            plain = run_recorded(self._models["plain"], rounded, self._sites)
        converted = run_recorded(self._models["converted"], rounded, self._sites)
        self._add_outputs(plain, converted, wide)
        for name in self._sites:
            self._add_site(name, plain, converted, wide)
        for position, name in enumerate(converted.order):
            self.last_call[name] = max(position, self.last_call.get(name, 0))
        self._add_logits(rounded, plain.outputs, converted.outputs, wide.outputs)
        self.samples += batch.size

    @contextmanager
    def _blaming_the_original(self) -> Iterator[None]:
        """Inside, what the original raises is the fault of the dtype: in the wider one it ran."""
        own, wide = map(dtype_name, self._dtypes)
        try:
            yield
        except (FlashBiasError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of any library
            raise UsageError(
                f"the original itself fails in {own}, and runs in {wide}: "
                f"{type(error).__name__}: {error}",
                f"no conversion can be compared with it in {own}; compare in {wide}",
            ) from error

    def _note_what_the_original_spoils(self, name: str, plain: Tensor, wide: Tensor) -> None:
        """Say where only the original in the dtype in use has NaN or infinity."""
        if bool(plain.isfinite().all()) or not bool(wide.isfinite().all()):
            return
        own, wider = map(dtype_name, self._dtypes)
        note = (
            f"the original itself has NaN or infinity in {own} (output {name}), and none in "
            f"{wider}: no conversion can be judged in {own}"
        )
        if note not in self.notes:
            self.notes.append(note)

    # -- tensors -----------------------------------------------------------------------------

    def _add_outputs(self, plain: Record, converted: Record, wide: Record) -> None:
        if not plain.outputs:
            raise UsageError("the original returns no tensor of floating point")
        for name, tensor in plain.outputs.items():
            found = converted.outputs.get(name)
            if found is None or found.shape != tensor.shape:
                self._wrong[f"output {name}"] = "the converted model returns " + _shape(found)
                self._outputs.setdefault(name, Accumulator(self._dtypes[0]))
                continue
            self._note_what_the_original_spoils(name, tensor, wide.outputs[name])
            collected = self._outputs.setdefault(name, Accumulator(self._dtypes[0]))
            collected.add(tensor, found, wide.outputs[name])

    def _add_site(self, name: str, plain: Record, converted: Record, wide: Record) -> None:
        calls = [record.sites.get(name, []) for record in (plain, converted, wide)]
        self.calls[name] += len(calls[1])
        if len({len(own) for own in calls}) > 1:
            self._wrong[name] = f"runs {len(calls[0])} times in the original, {len(calls[1])} here"
            return
        for before, after, truth in zip(*calls, strict=True):
            # attention weights are no loss: fused attention never has them
            shared = [k for k in before if k in after and before[k].shape == after[k].shape]
            if next(iter(before), None) not in shared:
                first = next(iter(after.values()), None)
                self._wrong[name] = f"returns {_shape(first)} after conversion"
                return
            for key in shared:
                self._inner[name].add(before[key], after[key], truth[key])

    # -- logits ------------------------------------------------------------------------------

    def _add_logits(
        self,
        batch: Batch,
        plain: Mapping[str, Tensor],
        converted: Mapping[str, Tensor],
        wide: Mapping[str, Tensor],
    ) -> None:
        first = not self.samples
        if first:
            self.logits = logits_name(plain)
        name = self.logits
        if name is not None and f"output {name}" not in self._wrong:
            self.agreement.add(plain[name], converted[name], wide[name])
        if batch.labels is None or self._task is None:
            return
        if first:
            self._start_scores(batch, None if name is None else plain[name])
        for which, outputs in (("original", plain), ("converted", converted)):
            if which in self.scores and name is not None and name in outputs:
                self.scores[which].add(outputs[name], batch.labels)

    def _start_scores(self, batch: Batch, logits: Tensor | None) -> None:
        """Decide, with the first batch, whether its labels say anything."""
        assert self._task is not None and batch.labels is not None
        problem = label_problem(self._task, logits, batch.labels)
        if problem is None and self._task == "next token":
            assert self.logits is not None and logits is not None
            changed = run_recorded(self._models["plain"], _last_token_changed(batch), ())
            if sees_the_future(logits, changed.outputs[self.logits]):
                problem = "a token's logits depend on later tokens"
        if problem is None:
            self.scores = {which: Scores(self._task) for which in ("original", "converted")}
            return
        what = "perplexity" if self._task == "next token" else "accuracy"
        self.notes.append(f"no {what}: {problem}")

    # -- verdicts ----------------------------------------------------------------------------

    def compared_outputs(self, mode: Mode) -> tuple[Comparison, ...]:
        """One verdict per output of the model."""
        return tuple(
            self._verdict(name, f"output {name}", mode, collected, 0)
            for name, collected in self._outputs.items()
        )

    def compared_sites(self, exact: Mapping[str, bool]) -> tuple[Comparison, ...]:
        """One verdict per site; after the first truncated site nothing is exact any more.

        Args:
            exact: per site, whether its terms are exact.
        """
        rough = [at for name, at in self.last_call.items() if not exact[name]]
        first = min(rough, default=len(self._sites) + sum(self.calls.values()))
        found = []
        for name in self._sites:
            untouched = exact[name] and self.last_call.get(name, 0) < first
            mode: Mode = "exact" if untouched else "approximate"
            if not self.calls[name] and name not in self._wrong:
                reason = "it did not run with these inputs, so nothing is known of it"
                found.append(Comparison(name, mode, "not run", reason=reason))
                continue
            found.append(self._verdict(name, name, mode, self._inner[name], self.calls[name]))
        return tuple(found)

    def _verdict(
        self, name: str, key: str, mode: Mode, collected: Accumulator, calls: int
    ) -> Comparison:
        if key in self._wrong:
            return Comparison(name, mode, "not comparable", None, calls, self._wrong[key])
        return compare(name, mode, collected.result(), calls)


def _last_token_changed(batch: Batch) -> Batch:
    labels = batch.labels
    assert labels is not None

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != labels.shape:
            return value
        changed = value.clone()
        # its neighbour's value, or another where that is the same
        changed[:, -1] = value[:, -2].where(value[:, -2] != value[:, -1], (value[:, -1] + 1) % 2)
        return changed

    args = tuple(change(value) for value in batch.args)
    return dataclasses.replace(
        batch, args=args, kwargs={k: change(v) for k, v in batch.kwargs.items()}
    )


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
