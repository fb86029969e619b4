"""Tables for the heads of a bias: of relative positions, or looked up pair by pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..terms import Lookup, RelativeTable
from .exact import relative_table
from .lookups import few_values, lookup

#: Relative tables and lookups, each with the heads that it was found for.
Tables = list[tuple[list[int], RelativeTable | Lookup]]


def find_tables(bias: Tensor, heads: list[int], index: Tensor | None, name: str) -> Tables:
    """Tables for as many of the heads as have one, in as few terms as possible.

    Relative tables first: theirs are codes per token. The rest is looked up pair by pair, if it is.
    """
    found = _relative_tables(bias, heads, index, name)
    with_table = {head for members, _ in found for head in members}
    return found + _lookups(bias, [head for head in heads if head not in with_table])


def _lookups(bias: Tensor, heads: list[int]) -> Tables:
    """One term for the heads, or for those of them that take few values."""
    if not heads:
        return []
    term = lookup(select(bias, heads))
    if term is not None:
        return [(heads, term)]
    some = [head for head in heads if few_values(select(bias, [head]))]
    return _lookups(bias, some) if len(some) < len(heads) else []


def _relative_tables(bias: Tensor, heads: list[int], index: Tensor | None, name: str) -> Tables:
    if not heads:
        return []
    together = relative_table(select(bias, heads), index, name=name)
    if together is not None:
        return [(heads, together)]
    alone = {h: relative_table(select(bias, [h]), index, name=name) for h in heads}
    found = {h: term for h, term in alone.items() if term is not None}
    if len(found) < len(heads):
        return _relative_tables(bias, list(found), index, name)
    return _group(found)


def _group(found: dict[int, RelativeTable]) -> Tables:
    """Heads whose tables share their codes go into one term."""
    groups: list[list[int]] = []
    for head, term in found.items():
        for members in groups:
            first = found[members[0]]
            if torch.equal(first.u, term.u) and torch.equal(first.v, term.v):
                members.append(head)
                break
        else:
            groups.append([head])
    return [(members, _merge([found[h] for h in members])) for members in groups]


def _merge(terms: Sequence[RelativeTable]) -> RelativeTable:
    """One term from terms of one head each that share their codes."""
    return dataclasses.replace(terms[0], table=torch.cat([t.table for t in terms], dim=-2))


def select(bias: Tensor, heads: list[int]) -> Tensor:
    """The matrices of some heads; the bias itself where they are all."""
    if len(heads) == bias.shape[-3]:
        return bias
    return bias.index_select(-3, torch.tensor(heads, device=bias.device))
