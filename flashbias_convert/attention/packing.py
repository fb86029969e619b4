"""From a bias to what the Triton kernel reads.

Heads that need the same kinds of terms, and low-rank terms of a like size, form a group; the
kernel runs once per group, on those heads alone. Everything that decides how a kernel is compiled
is in a `GroupSpec`; it never depends on the value of a tensor, so packing does not synchronise.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedTermError
from ..terms import (
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
from ..terms.constants import integers, kept
from .factor_columns import (
    COLUMN_BUCKETS,
    bucket,
    columns_by_torch,
    factor_columns,
    padded_columns,
)
from .factors import effective_factors, scale_size
from .selection import Selection, with_selections


@dataclass(frozen=True)
class GroupSpec:
    """How the kernel treats one group of heads.

    Attributes:
        heads: the query heads of the group; None means all.
        columns: padded number of factor columns, 0 without factors.
        split: how many leading factor columns come as high and low parts.
        scaled: phi_q is already divided by the scale of q k, see `pack`, and rounded.
        symmetric: ALiBi by absolute distance.
        region_value: what a pair of different regions adds.
        region_pairs: see `Regions.pairs`.
        by_distance: see `RelativeTable`.
        pairs: the table has behind each entry the one before it, see `RelativeTable`.
        divided: the table is already divided by it, too.
        tensors: names of the tensors that follow, in order.
    """

    heads: tuple[int, ...] | None
    columns: int = 0
    split: int = 0
    scaled: bool = False
    symmetric: bool = False
    region_value: float = 0.0
    region_pairs: bool = False
    by_distance: int = 0
    pairs: bool = False
    divided: bool = False
    tensors: tuple[str, ...] = ()

    def values(self) -> tuple[object, ...]:
        """The fields in order."""
        return (
            self.heads,
            self.columns,
            self.split,
            self.scaled,
            self.symmetric,
            self.region_value,
            self.region_pairs,
            self.by_distance,
            self.pairs,
            self.divided,
            self.tensors,
        )


_FIELDS = dataclasses.fields(GroupSpec)


@dataclass(frozen=True, eq=False)
class PackedBias:
    """Flat tensors, and a string that says what they are.

    Attributes:
        groups: how the kernel treats each group of heads.
        tensors: the tensors of all groups, in order.
        spec: literal of the values of all groups.
    """

    groups: tuple[GroupSpec, ...]
    tensors: list[Tensor]
    spec: str = field(init=False)

    def __post_init__(self) -> None:
        # a literal and no JSON, because torch.compile must see through this, too
        object.__setattr__(self, "spec", repr(tuple(group.values() for group in self.groups)))


@lru_cache(maxsize=4096)
def parse_spec(spec: str) -> tuple[GroupSpec, ...]:
    """The groups that a `PackedBias.spec` describes.

    Raises:
        ValueError: it was made by another version, as of a program that was exported then.
    """
    groups = ast.literal_eval(spec)
    if any(len(values) != len(_FIELDS) for values in groups):
        raise ValueError(
            "a packed bias of another version of flashbias_convert: export the program anew"
        )
    return tuple(GroupSpec(*values) for values in groups)


#: What the kernel reads when there is no bias.
NO_BIAS = PackedBias((GroupSpec(None),), [])


def pack(bias: ScoreBias, *, half: bool, scale: float | None = None) -> PackedBias:
    """Prepare a bias for the Triton kernel.

    Args:
        bias: the terms.
        half: factors in fp16 next to fp16 or bf16 scores; else in fp32.
        scale: the scale of q k, if it is one number, and `factors.COSINE_UNIT` with cosine
            attention. Factors and tables are then divided by it here and not in the kernel.

    Raises:
        UnsupportedTermError: a sum that the kernel cannot add; see `unsupported`.
    """
    if not bias.terms:
        return NO_BIAS
    reason = unsupported(bias, half=half)
    if reason:
        raise UnsupportedTermError(f"the triton backend cannot add this bias: {reason}")
    bias = for_kernel(bias.with_one_dense(), half=half)
    specs, flat = [], []
    for heads in head_groups(bias, half=half):
        spec, tensors = _pack_group(bias, heads, half, scale)
        specs.append(spec)
        flat += tensors
    return PackedBias(tuple(specs), flat)


def can_join(own: ScoreBias, extra: Sequence[Term]) -> bool:
    """Whether `join` can add these terms to the packed form of a bias. Reads no tensors."""
    simple = all(t.heads is None and not isinstance(t, Axial | LowRank) for t in extra)
    added_up = all(any(isinstance(t, Dense) for t in terms) for terms in (own.terms, extra))
    return len(own.terms) > 0 and simple and not added_up


def join(packed: PackedBias, extra: Sequence[Term]) -> PackedBias:
    """What `pack` makes of a bias with more terms, without packing the others anew.

    A table among these is packed as it is.

    Args:
        packed: made by `pack`.
        extra: terms of all heads, see `can_join`.
    """
    groups, flat, first = [], [], 0
    for group in packed.groups:
        last = first + len(group.tensors)
        flat += packed.tensors[first:last]
        for term in extra:
            chosen = term if group.heads is None else term.select_heads(group.heads)
            assert chosen is not None
            tensors = pack_term(chosen)
            names = (*group.tensors, *tensors)
            group = dataclasses.replace(group, **spec_fields(chosen), tensors=names)
            flat += tensors.values()
        groups.append(group)
        first = last
    return PackedBias(tuple(groups), flat)


def for_kernel(bias: ScoreBias, *, half: bool, rounded: bool = False) -> ScoreBias:
    """The same bias in the terms that the kernel adds fastest. Reads shapes only.

    In fp32 products do not run on tensor cores, and look-ups are the faster way.

    Args:
        bias: the terms.
        half: q, k and v are in half precision.
        rounded: whether axial terms may be rounded to it, see `with_selections`.
    """
    if not (half and any(isinstance(t, Axial) for t in bias.terms)):
        return bias
    taken = max(_head_columns([t for t in bias.terms if _touches(t, h)], h, half)
                for h in _different_heads(bias))  # fmt: skip
    return with_selections(bias, COLUMN_BUCKETS[-1] - taken, rounded=rounded)


def unsupported(bias: ScoreBias, *, half: bool) -> str | None:
    """Why the kernel cannot add this bias, or None if it can. Reads shapes only."""
    known = (Alibi, Axial, Dense, Diagonal, KeyBias, Lookup, LowRank, Regions, RelativeTable)
    for term in bias.terms:
        if not isinstance(term, known):
            return f"there is no kernel for {term.kind} terms"
    for head in _different_heads(bias):
        own = [t for t in bias.terms if _touches(t, head)]
        kinds = [t.kind for t in own if not isinstance(t, LowRank)]
        # those are added up
        double = sorted({k for k in kinds if kinds.count(k) > 1 and k != Dense.kind})
        if double:
            return f"head {head} has more than one {double[0]} term"
        columns = _head_columns(own, head, half)
        if columns > COLUMN_BUCKETS[-1]:
            return f"head {head} needs {columns} factor columns, more than {COLUMN_BUCKETS[-1]}"
    return None


def head_groups(bias: ScoreBias, *, half: bool) -> list[tuple[int, ...]]:
    """Heads with like terms, in order of their first head."""
    if len(_different_heads(bias)) == 1:
        return [tuple(range(bias.num_heads))]
    groups: dict[object, list[int]] = {}
    for head in range(bias.num_heads):
        groups.setdefault(_signature(bias, head, half), []).append(head)
    return [tuple(heads) for heads in groups.values()]


def _different_heads(bias: ScoreBias) -> range:
    """Heads to look at: the first one where all have the same terms of the same rank."""
    alike = all(t.heads is None and getattr(t, "ranks", None) is None for t in bias.terms)
    return range(1 if alike else bias.num_heads)


def _touches(term: Term, head: int) -> bool:
    return term.heads is None or head in term.heads


def splits(term: LowRank, half: bool) -> int:
    """How many columns of a term come as high and low parts."""
    if not half:
        return 0
    return term.max_rank if term.split is None else min(term.split, term.max_rank)


def _columns_of(term: LowRank, half: bool, rank: int) -> int:
    return rank + 2 * min(splits(term, half), rank)


def _head_columns(terms: Sequence[Term], head: int, half: bool) -> int:
    thin = [t for t in terms if isinstance(t, LowRank)]
    return sum(_columns_of(t, half, _rank_of(t, head)) for t in thin)


def _rank_of(term: LowRank, head: int) -> int:
    ranks = term.ranks
    if not ranks or len(ranks) == 1:
        return term.largest_rank
    return ranks[head if term.heads is None else term.heads.index(head)]


def _signature(bias: ScoreBias, head: int, half: bool) -> tuple[object, ...]:
    """What must be equal for two heads to run in one launch."""
    own = [i for i, term in enumerate(bias.terms) if _touches(term, head)]
    columns = _head_columns([bias.terms[i] for i in own], head, half)
    return (bucket(columns), tuple(own))


def _pack_group(
    bias: ScoreBias, heads: tuple[int, ...], half: bool, scale: float | None
) -> tuple[GroupSpec, list[Tensor]]:
    chosen, tensors = heads_of(bias, heads)
    spec = first_fields(heads if tensors else None)
    thin = [t for t in chosen.terms if isinstance(t, LowRank) and t.largest_rank > 0]
    if thin:
        split, tensors["phi_q"], tensors["phi_k"] = _pack_factors(thin, half, scale)
        columns = tensors["phi_q"].shape[-1]
        spec |= {"columns": columns, "split": split, "scaled": scale is not None}
    for term in chosen.terms:
        if not isinstance(term, LowRank):
            tensors |= pack_term(term)
            spec |= spec_fields(term)
        if isinstance(term, RelativeTable):
            tensors["table"], known = _for_reading(tensors["table"], term, scale)
            spec |= known
    return GroupSpec(**spec, tensors=tuple(tensors)), list(tensors.values())


def _for_reading(
    table: Tensor, term: RelativeTable, scale: float | None
) -> tuple[Tensor, dict[str, bool]]:
    """The packed table of a term as the kernel adds it up fastest, and what that says."""
    if term.by_distance:  # the kernel for Hopper reads these, as they are
        return table, {}
    if scale is not None:
        table = table / scale_size(scale)
    if term.pairs:
        before = torch.cat([table[..., :1], table[..., :-1]], -1)
        table = torch.stack([table, before], -1).flatten(-2)
    return table, {"pairs": term.pairs, "divided": scale is not None}


def first_fields(heads: tuple[int, ...] | None) -> dict[str, Any]:
    """What a `GroupSpec` has before its terms are known, by name."""
    # the value is that of its default, which torch.compile of torch 2.11 would take for an input
    return {"heads": heads, "region_value": 0.0}


def heads_of(bias: ScoreBias, heads: tuple[int, ...]) -> tuple[ScoreBias, dict[str, Tensor]]:
    """The bias of a group of heads, and by name the tensor that says which; nothing for all."""
    every = heads == tuple(range(bias.num_heads))
    if not every:
        # an index on the device, because a copy per call would synchronise
        index = kept(integers, heads, torch.int32, bias.device)
        return bias.select_heads(heads), {"heads": index}
    plain = all(t.heads is None for t in bias.terms)
    return bias if plain else bias.select_heads(heads), {}


def _pack_factors(
    terms: Sequence[LowRank], half: bool, scale: float | None
) -> tuple[int, Tensor, Tensor]:
    """Number of split columns, phi_q and phi_k of a group, padded to a compiled number of columns.

    The first 3 * split columns are triples: (high, high, low) parts of q, (high, low, high) of k.
    Without a scale, phi_q stays fp32 with each split column three times, and the kernel divides by
    the scale before it takes the parts.
    """
    dtype = torch.float16 if half else torch.float32
    if len(terms) == 1:
        count, phi_q, phi_k = leading_columns(terms[0], half)
        balanced = isinstance(terms[0], Selection)
        return count, *factor_columns(phi_q, phi_k, count, dtype, scale, balanced=balanced)
    split_q, split_k, plain_q, plain_k = [], [], [], []
    for term in terms:
        count, phi_q, phi_k = leading_columns(term, half)
        balanced = isinstance(term, Selection)
        packed_q, packed_k = columns_by_torch(phi_q, phi_k, count, dtype, scale, balanced=balanced)
        split_q.append(packed_q[..., : 3 * count])
        split_k.append(packed_k[..., : 3 * count])
        plain_q.append(packed_q[..., 3 * count :])
        plain_k.append(packed_k[..., 3 * count :])
    split = sum(t.shape[-1] for t in split_q) // 3
    return (
        split,
        padded_columns(side_by_side(split_q + plain_q)),
        padded_columns(side_by_side(split_k + plain_k)),
    )


def leading_columns(term: LowRank, half: bool) -> tuple[int, Tensor, Tensor]:
    """How many columns to split, and factors with as many columns as the largest rank."""
    rank = term.largest_rank
    phi_q, phi_k = effective_factors(term)
    if rank < term.max_rank:
        phi_q, phi_k = phi_q[..., :rank], phi_k[..., :rank]
    return min(splits(term, half), rank), phi_q, phi_k


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Concatenate columns; leading dimensions broadcast."""
    filled = [p for p in parts if p.shape[-1]]
    if len(filled) == 1:
        return filled[0]
    lead = torch.broadcast_shapes(*(p.shape[:-1] for p in filled))
    return torch.cat([p.expand(*lead, p.shape[-1]) for p in filled], -1)


def spec_fields(term: Term) -> dict[str, Any]:
    """What a term says in its group's specification."""
    if isinstance(term, Regions):
        return {"region_value": float(term.value), "region_pairs": term.pairs}
    if isinstance(term, RelativeTable):
        return {"by_distance": term.by_distance}
    return {"symmetric": term.symmetric} if isinstance(term, Alibi) else {}


def pack_term(term: Term) -> dict[str, Tensor]:
    """Named tensors of a term that is added element by element."""
    tensors = {_KERNEL_NAMES[term.kind, k]: t for k, t in term.tensors().items()}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            tensors[name] = tensor.to(torch.int32).contiguous()
        elif tensor.dtype == torch.float64 or name not in CASTABLE:
            tensors[name] = tensor.float()
    if "dense" in tensors:
        tensors["dense"] = vector_rows_of(tensors["dense"])
    for name in {"table", "lookup", "rel_h", "rel_w"} & set(tensors):
        tensors[name] = tensors[name].contiguous()  # their last dimension is read at an index
    if isinstance(term, Regions) and term.key_ids is None:
        tensors["key_ids"] = tensors["ids"]
    return tensors


def vector_rows_of(dense: Tensor) -> Tensor:
    """The same matrices (..., N, M) with rows that start at multiples of `ROW_STEP` numbers.

    Rows of 1218 numbers would be read one or two at a time. What is broadcast stays so.
    """
    steps = dense.stride()[:-1]
    if dense.stride(-1) == 1 and not any(step % ROW_STEP for step in steps):
        return dense
    if dense.requires_grad and 0 in steps:
        return dense  # the gradient is that of every entry, not of the one that is kept
    own = dense
    for dim, step in enumerate(steps):
        if step == 0:
            own = own.narrow(dim, 0, 1)
    missing = -dense.shape[-1] % ROW_STEP
    padded = torch.nn.functional.pad(own, (0, missing)).contiguous()
    return padded[..., : dense.shape[-1]].expand(dense.shape)


#: The stride, in numbers, that Triton knows to be a multiple of whole vectors.
ROW_STEP = 16
#: Tensors that the kernel reads in half precision, too.
CASTABLE = frozenset({"dense", "rel_h", "rel_w"})
#: (kind of term, field) -> name of the kernel's argument
_KERNEL_NAMES = {
    ("key_bias", "values"): "key_bias",
    ("key_bias", "row_scale"): "key_bias_rows",
    ("alibi", "slopes"): "slopes",
    ("alibi", "pos_q"): "pos_q",
    ("alibi", "pos_k"): "pos_k",
    ("alibi", "row_scale"): "alibi_rows",
    ("relative_table", "table"): "table",
    ("relative_table", "u"): "codes_q",
    ("relative_table", "v"): "codes_k",
    ("relative_table", "row_scale"): "table_rows",
    ("regions", "ids"): "ids",
    ("regions", "key_ids"): "key_ids",
    ("regions", "row_scale"): "region_rows",
    ("dense", "bias"): "dense",
    ("dense", "row_scale"): "dense_rows",
    ("diagonal", "values"): "diagonal",
    ("diagonal", "row_scale"): "diagonal_rows",
    ("lookup", "table"): "lookup",
    ("lookup", "code"): "lookup_code",
    ("lookup", "row_scale"): "lookup_rows",
    ("axial", "rel_h"): "rel_h",
    ("axial", "rel_w"): "rel_w",
    ("axial", "y"): "axial_y",
    ("axial", "x"): "axial_x",
    ("axial", "row_scale"): "axial_rows",
}
