"""Whether a mask that comes with a call is the one that a term stands for."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .attention.arguments import broadcasts
from .terms import Regions


class MaskMemo:
    """Remembers whether the last mask that came was the one that a term stands for.

    Attributes:
        doubtful: whether a mask of the planned shape may well be another: the last one was, or
            the model's maps have changed size since.
    """

    def __init__(self, doubtful: bool = False) -> None:
        self.doubtful = doubtful
        #: the last mask, its version, and whether it was the right one
        self._known: tuple[weakref.ref[Tensor], int, bool] | None = None

    def stands_for(self, term: Regions | None, mask: Tensor, times: int = 1) -> bool:
        """Whether `term` adds exactly `times` `mask`, shape (nW, N, M) or (*windows, N, M).

        One row of ids may serve the windows of several leading entries, as in Pangu, where the
        mask is the same at all longitudes.

        Values are compared once per mask object and version, which synchronises with its device.
        While torch.compile traces, only shapes are, and a doubtful mask is not trusted.
        """
        if term is None or not _mask_fits(term, mask):
            return False
        if torch.compiler.is_compiling():
            return not self.doubtful
        version = -1 if mask.is_inference() else mask._version
        known = self._known  # read once: another thread may look at another mask
        if known is None or known[0]() is not mask or known[1] != version:
            dense = term.dense(*mask.shape[-2:], dtype=mask.dtype).squeeze(-3)
            same = torch.equal(dense.expand_as(mask), mask if times == 1 else times * mask)
            known = (weakref.ref(mask), version, same)
            self._known = known
        self.doubtful = not known[2]
        return known[2]


def _mask_fits(term: Regions, mask: Tensor) -> bool:
    keys = term.ids if term.key_ids is None else term.key_ids
    own = (*term.batch_shape(), term.ids.shape[-1], keys.shape[-1])
    if len(own) > mask.dim() or own[-2:] != tuple(mask.shape[-2:]):
        return False
    return broadcasts(own[:-2], tuple(mask.shape[:-2]))
