"""A score bias: a sum of terms."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from .alibi import Alibi
from .axial import Axial
from .base import Term, joint_shape, require, require_shape
from .dense import Dense
from .diagonal import Diagonal
from .key_bias import KeyBias
from .lookup import Lookup
from .low_rank import LowRank
from .regions import Regions
from .relative_table import RelativeTable

TERM_KINDS: dict[str, type[Term]] = {
    cls.kind: cls
    for cls in (
        Alibi,
        Axial,
        Dense,
        Diagonal,
        KeyBias,
        Lookup,
        LowRank,
        Regions,
        RelativeTable,
    )
}


@dataclass(frozen=True, eq=False)
class ScoreBias:
    """The sum of `terms`, added to the scores of `num_heads` heads.

    Attributes:
        terms: the summands. Each acts on all heads, or on the heads that it names.
        num_heads: H, the number of query heads.
    """

    terms: tuple[Term, ...]
    num_heads: int

    def __post_init__(self) -> None:
        # messages are made where they are needed: a trace cannot write open sizes into a string
        if self.num_heads <= 0:
            raise ValueError(f"num_heads must be positive, got {self.num_heads}")
        for term in self.terms:
            self._check_heads(term)

    def _check_heads(self, term: Term) -> None:
        if term.row_scale is not None:
            require_shape(f"{term.kind}: row_scale", term.row_scale, 2, "(*batch, H, N)")
        own, heads = term.num_own_heads(), term.heads
        expected = self.num_heads if heads is None else len(heads)
        if own != 1 and own != expected:  # a trace finds no open size in a tuple
            raise ValueError(f"{term.kind} has {own} heads, expected 1 or {expected}")
        if heads is not None:
            valid = len(set(heads)) == len(heads) and all(0 <= h < self.num_heads for h in heads)
            if not valid:
                raise ValueError(
                    f"{term.kind}: heads {heads} are not distinct or not below {self.num_heads}"
                )

    # -- meaning ---------------------------------------------------------------------------

    def dense(
        self,
        n: int,
        m: int,
        *,
        query_start: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> Tensor:
        """The whole bias, shape (*batch, H, n, m). See `Term.dense`."""
        total = torch.zeros(self.num_heads, n, m, dtype=dtype, device=device or self.device)
        for term in self.terms:
            total = total + self._spread(
                term, term.dense(n, m, query_start=query_start, dtype=dtype)
            )
        return total

    def _spread(self, term: Term, dense: Tensor) -> Tensor:
        """Place the heads of a term among all heads: (*batch, H, n, m)."""
        if term.heads is None:
            return dense
        heads = torch.tensor(term.heads, device=dense.device)
        source = dense.expand(*dense.shape[:-3], len(term.heads), *dense.shape[-2:])
        shape = (*dense.shape[:-3], self.num_heads, *dense.shape[-2:])
        return dense.new_zeros(shape).index_copy(dense.dim() - 3, heads, source)

    def batch_shape(self) -> tuple[int, ...]:
        """Broadcast shape of the leading dimensions of all terms."""
        return joint_shape((), *(t.batch_shape() for t in self.terms))

    @property
    def device(self) -> torch.device:
        """Where the first tensor lives; the CPU for a bias without terms."""
        return next((t.device for _, t in self.named_tensors()), torch.device("cpu"))

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor asks for a gradient."""
        return any(t.requires_grad for _, t in self.named_tensors())

    def with_one_dense(self) -> ScoreBias:
        """The same sum, where dense terms that share heads are one. Differentiable.

        A mask that comes with a call is such a term beside a dense bias. They are added up in fp32
        at least; the sum is bf16 if the first of them is.
        """
        dense = [term for term in self.terms if isinstance(term, Dense)]
        of = [h for t in dense for h in (range(self.num_heads) if t.heads is None else t.heads)]
        if len(of) == len(set(of)):
            return self
        dtype = functools.reduce(torch.promote_types, (t.bias.dtype for t in dense), torch.float32)
        n, m = dense[0].bias.shape[-2:]
        parts = [self._spread(term, term.dense(n, m, dtype=dtype)) for term in dense]
        total = functools.reduce(torch.add, parts)
        if dense[0].bias.dtype == torch.bfloat16:  # which reaches as far; fp16 does not
            total = total.to(torch.bfloat16)
        one = Dense(bias=total)
        others = tuple(term for term in self.terms if not isinstance(term, Dense))
        return ScoreBias((*others, one), self.num_heads)

    # -- heads, moves ----------------------------------------------------------------------

    def select_heads(self, heads: Sequence[int]) -> ScoreBias:
        """The bias of the given heads, in that order, renumbered 0, 1, ..."""
        bad = [h for h in heads if not 0 <= h < self.num_heads]
        require(not bad, f"heads {bad} do not exist, this bias has {self.num_heads}")
        chosen = [term.select_heads(heads) for term in self.terms]
        return ScoreBias(tuple(t for t in chosen if t is not None), len(heads))

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> ScoreBias:
        """A copy on `device`; integers and fp32 tensors that must stay exact keep their dtype."""
        return ScoreBias(tuple(t.to(device, dtype) for t in self.terms), self.num_heads)

    def __add__(self, other: ScoreBias) -> ScoreBias:
        require(
            self.num_heads == other.num_heads,
            f"cannot add a bias of {other.num_heads} heads to one of {self.num_heads}",
        )
        return ScoreBias(self.terms + other.terms, self.num_heads)

    # -- state for checkpoints -------------------------------------------------------------

    def term_names(self) -> list[str]:
        """A name per term: its kind, with a number from the second of a kind on."""
        seen: Counter[str] = Counter()
        names = []
        for term in self.terms:
            seen[term.kind] += 1
            count = seen[term.kind]
            names.append(term.kind if count == 1 else f"{term.kind}_{count}")
        return names

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of '<term>.<tensor>' and tensor, in a fixed order."""
        for name, term in zip(self.term_names(), self.terms, strict=True):
            for field_name, tensor in term.tensors().items():
                yield f"{name}.{field_name}", tensor

    def spec(self) -> dict[str, Any]:
        """Everything but the tensors' values, as JSON: rebuilds the bias with `from_state`."""
        return {
            "num_heads": self.num_heads,
            "terms": [
                {
                    "name": name,
                    "kind": term.kind,
                    "static": term.static(),
                    "tensors": {k: _describe(t) for k, t in term.tensors().items()},
                }
                for name, term in zip(self.term_names(), self.terms, strict=True)
            ],
        }

    @staticmethod
    def layout(spec: Mapping[str, Any]) -> str:
        """What tensors of the right shapes do not tell: kinds, heads, ranks, as canonical JSON.

        Args:
            spec: from `spec()`, now or by an older version; with builders, if any, and with
                "trained" if the terms are parameters that have left their decomposition behind.
        """
        terms = [
            {"name": entry["name"], "kind": entry["kind"], **_not_default(entry)}
            for entry in spec["terms"]
        ]
        built: dict[str, Any] = {"trained": True} if spec.get("trained") else {}
        if spec.get("builders"):
            built["builders"] = list(spec["builders"])
        if spec.get("builder_modules"):
            entries = spec["builder_modules"]
            built["builder_modules"] = [
                {key: entry[key] for key in ("name", "kind", "config")} for entry in entries
            ]
        facts = {"num_heads": spec["num_heads"], "terms": terms, **built}
        return json.dumps(facts, sort_keys=True)

    @classmethod
    def from_state(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Rebuild a bias from `spec()` and a mapping of '<term>.<tensor>' to tensors.

        Raises:
            ValueError: an unknown kind of term, or a missing tensor.
        """
        terms = []
        for entry in spec["terms"]:
            kind = entry["kind"]
            require(kind in TERM_KINDS, f"unknown kind of term {kind!r}; is the file newer?")
            keys = {k: f"{entry['name']}.{k}" for k in entry["tensors"]}
            missing = [full for full in keys.values() if full not in tensors]
            require(not missing, f"tensors {missing} of the score bias are missing")
            own = {k: tensors[full] for k, full in keys.items()}
            terms.append(TERM_KINDS[kind].from_state(entry["static"], own))
        return cls(tuple(terms), int(spec["num_heads"]))

    @classmethod
    def empty_from_spec(cls, spec: Mapping[str, Any], device: Any = None) -> Self:
        """A bias with uninitialised tensors of the shapes and dtypes that `spec` names."""
        tensors = {
            f"{entry['name']}.{k}": torch.zeros(
                tuple(info["shape"]), dtype=_dtype(info["dtype"]), device=device
            )
            for entry in spec["terms"]
            for k, info in entry["tensors"].items()
        }
        return cls.from_state(spec, tensors)


def _not_default(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Static values that differ from their defaults: fields of later versions change nothing."""
    static = entry["static"]
    if entry["kind"] not in TERM_KINDS:
        return dict(static)
    defaults = {f.name: f.default for f in dataclasses.fields(TERM_KINDS[entry["kind"]])}
    return {k: v for k, v in static.items() if v != defaults.get(k)}


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )
}


def _dtype(name: str) -> torch.dtype:
    require(name in _DTYPES, f"unknown dtype {name!r} in the plan")
    return _DTYPES[name]
