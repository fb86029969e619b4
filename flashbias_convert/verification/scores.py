"""What the logits of two models say: the same class or token, and how often the right one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..inputs.batch import Task


class Agreement:
    """Counts how often two models prefer the same class or token."""

    def __init__(self) -> None:
        self.same = self.own = self.total = 0

    def add(self, plain: Tensor, converted: Tensor, wide: Tensor) -> None:
        """Logits of shape (..., classes)."""
        choice = plain.argmax(-1)
        self.same += int((converted.argmax(-1) == choice).sum())
        self.own += int((wide.argmax(-1) == choice).sum())
        self.total += choice.numel()

    def share(self) -> float | None:
        """Converted and original; None if nothing was counted."""
        return self.same / self.total if self.total else None

    def own_share(self) -> float | None:
        """The original in the dtype in use, and in the wider one."""
        return self.own / self.total if self.total else None


class Scores:
    """Top-1 and top-5, or perplexity, of one model.

    Args:
        task: what the labels are.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._count = self._top1 = self._top5 = 0
        self._loss = 0.0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Logits (B, classes) with labels (B,), or (B, L, tokens) with (B, L)."""
        labels = labels.to(logits.device)
        if self._task == "classes":
            ranked = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels[:, None]
            self._top1 += int(ranked[:, 0].sum())
            self._top5 += int(ranked.any(-1).sum())
            self._count += len(labels)
            return
        predicted = logits[:, :-1].double().flatten(0, 1)
        self._loss += float(F.cross_entropy(predicted, labels[:, 1:].flatten(), reduction="sum"))
        self._count += len(predicted)

    def to_json(self) -> dict[str, Any]:
        """ "top1" and "top5" in [0, 1], or "perplexity"; and the number of labels."""
        if not self._count:
            return {}
        if self._task == "classes":
            top = {"top1": self._top1 / self._count, "top5": self._top5 / self._count}
            return {**top, "labels": self._count}
        mean = self._loss / self._count
        perplexity = math.exp(mean) if mean < 700 else math.inf  # NaN stays NaN
        finite = math.isfinite(perplexity)
        return {"perplexity": perplexity if finite else None, "labels": self._count}


def label_problem(task: Task, logits: Tensor | None, labels: Tensor) -> str | None:
    """Why labels say nothing about these logits, or None if they do."""
    if logits is None:
        return "the model returns no logits"
    if task == "next token":
        fits = logits.dim() == 3 and logits.shape[:2] == labels.shape and labels.shape[1] > 1
        return None if fits else f"logits of shape {tuple(logits.shape)} are not one per token"
    if logits.dim() != 2:
        return f"logits of shape {tuple(logits.shape)} are not one per image"
    bad = labels[(labels < 0) | (labels >= logits.shape[-1])]
    return f"label {int(bad[0])} is not one of {logits.shape[-1]} classes" if len(bad) else None


def sees_the_future(before: Tensor, after: Tensor) -> bool:
    """Whether logits of earlier tokens moved when only the last token was changed.

    Args:
        before, after: logits (B, L, tokens) without and with the change.
    """
    moved = (before[:, :-1].double() - after[:, :-1].double()).abs().max()
    # a mask leaves nothing but rounding
    scale = float(before.abs().max()) * math.sqrt(torch.finfo(before.dtype).eps)
    return bool(moved > scale)
