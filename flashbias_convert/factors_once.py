"""Factors once per structure: for pair representations that stay the same for many calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from .errors import UsageError
from .pair_attention import PairAttention
from .pair_memory import DENOISING_STEPS, PairMemory
from .selection import Choice


@contextlib.contextmanager
def factors_once(
    model: nn.Module,
    *,
    energy: float = 0.99,
    rank: int | None = None,
    max_attention_error: float = 0.25,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    unchanged: bool = False,
    steps: int | None = None,
) -> Iterator[tuple[PairMemory, ...]]:
    """Inside, sites keep what they made of a pair representation that comes again.

    In the diffusion of AlphaFold 3 the pair representation of a structure is the same at all
    denoising steps, and so is every layer's bias. When a site sees the same tensor a second time,
    its bias is kept and not projected again, or replaced by factors of one randomised SVD where
    they pay: where what the kernel saves in all steps, by its costs on Hopper (`decompose.costs`),
    is more than the time of the SVD as measured on this class of card (`decompose.factor_times`).
    Elsewhere, on cards whose SVDs were not measured, and for heads that would lose too much, the
    bias stays as it is; decisions say why, with the numbers. Where no rank can pay no SVD is
    made; where one was made in vain, the site makes no more of them for structures of that size or
    smaller.
    A tensor that was written to, or another one, starts anew, and so do other weights. Under
    ``torch.inference_mode`` tensors do not count their writes: do not change one in place there.

    Factors hold for any mask. Padding counts as much as other tokens for what they keep.

    Args:
        model: patched. Compiled calls, and calls that need gradients of the pair representation,
            use the bias as it is; what fitted factor networks serve is left to them.
        energy: share of the squared singular values of the row-centred bias to keep.
        rank: this rank for every head instead, where it costs less than a dense bias, the time of
            its SVD included.
        max_attention_error: see `DecomposeOptions`; not for `rank`.
        include, exclude: see `inspect_model`.
        unchanged: vouch that each chosen site sees one pair representation only, although every
            call brings a copy of it (Protenix casts it at each step). Needs `include`.
        steps: how often each site is called for one structure, which factors have to pay in;
            None means 200, the denoising steps of AlphaFold 3.

    Yields:
        The memory of each site, with its decisions and how many calls it has served.

    Raises:
        UsageError: no patched site has such a bias, `unchanged` without `include`, or `steps` that
            are no number of calls.
    """
    steps = DENOISING_STEPS if steps is None else steps
    if type(steps) is not int or steps < 1:
        raise UsageError(f"steps must be a positive integer, got {steps!r}")
    include = [include] if isinstance(include, str) else list(include)
    if unchanged and not include:
        raise UsageError(
            "unchanged=True is for chosen sites: in others the bias does change",
            "name the sites of the diffusion module with include=",
        )
    sites = {
        name: module for name, module in model.named_modules() if isinstance(module, PairAttention)
    }
    choice = Choice(include, exclude, list(sites))
    chosen = {n: m for n, m in sites.items() if choice.reason_against([n]) is None}
    if not chosen:
        raise UsageError(
            "no patched site has a bias of a pair representation", "call patch_model first"
        )
    memories = {
        name: PairMemory(name, energy, rank, max_attention_error, unchanged, steps)
        for name in chosen
    }
    before = {name: module.score_bias.pair_memory for name, module in chosen.items()}
    for name, module in chosen.items():
        module.score_bias.pair_memory = memories[name]
    try:
        yield tuple(memories.values())
    finally:
        for name, module in chosen.items():
            module.score_bias.pair_memory = before[name]
            memories[name].forget()
