"""Attention that is handed the index of its table: one that a network keeps for all its layers."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from .modules import ScoreBiasModule
from .patched_attention import PatchedAttention
from .seals import state_of

COMPILED_FOR_THE_USUAL = (
    "the index of relative positions is another one than this was compiled for; call it once "
    "before it is compiled"
)


class HandedIndexAttention(PatchedAttention):
    """Base of patched attention whose calls may bring an index; its terms are for the usual one."""

    def usual_index(self) -> Tensor:
        """The index that the terms were made with, integers (N, M) on any device."""
        raise NotImplementedError

    def is_usual(self, handed: Tensor) -> bool:
        """Whether an index that came with a call is the usual one.

        Values are compared once per tensor and version, which synchronises with its device. A graph
        cannot wait for that: compiled code compares in each call, without waiting, and fails with
        another index, unless a call in eager mode had one before it was compiled.

        Args:
            handed: the index, N * M integers in any shape.
        """
        terms = self.score_bias
        if torch.compiler.is_compiling():
            usual = self.usual_index().flatten().to(handed.device)
            if terms.met_another_index or handed.numel() != usual.numel():
                return False
            torch._assert_async((handed.flatten() == usual).all(), COMPILED_FOR_THE_USUAL)
            return True
        known, state = _KNOWN.get(terms), state_of((handed,))
        if known is None or known[0]() is not handed or known[1] != state:
            same = torch.equal(handed.flatten(), self.usual_index().flatten().to(handed.device))
            known = _KNOWN[terms] = (weakref.ref(handed), state, same)
            terms.met_another_index |= not same
        return known[2]


#: the last index that came to the terms of a site, its state, and whether it was the usual one
_KNOWN: weakref.WeakKeyDictionary[
    ScoreBiasModule, tuple[weakref.ref[Tensor], tuple[Hashable, ...], bool]
]
_KNOWN = weakref.WeakKeyDictionary()
