"""The attention calls of a patched model, and what takes their place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..attention.arguments import AttentionArguments, check_arguments
from ..inputs import Batch
from ..modules import ScoreBiasModule
from ..patched_attention import PatchedAttention
from ..terms import LowRank, Regions, ScoreBias

#: called with the terms of a site, q, k, v and the keyword arguments of `ScoreBiasModule.forward`
Attend = Callable[..., Tensor]
_OF_TERMS = ("built", "extra", "without", "heads")


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call, its terms resolved.

    Attributes:
        q, k, v: shapes (*batch, H, N, D), (*batch, Hkv, M, D), (*batch, Hkv, M, Dv).
        bias: every term of the call, those that were made from its input included.
        args: scale, causality, masks.
        score_bound: see `flashbias_attention`.
        backend: see `flashbias_attention`.
        is_static: whether the bias is the same in every call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: ScoreBias
    args: AttentionArguments
    score_bound: float | None = None
    backend: str = "auto"
    is_static: bool = True

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading dimensions of q."""
        return tuple(self.q.shape[:-3])

    @property
    def groups(self) -> int:
        """Query heads per head of k and v."""
        return int(self.q.shape[-3] // self.k.shape[-3])

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the terms, in order, each once."""
        return tuple(dict.fromkeys(term.kind for term in self.bias.terms))

    @property
    def rank(self) -> int | None:
        """Largest rank of a low-rank term."""
        ranks = [t.max_rank for t in self.bias.terms if isinstance(t, LowRank)]
        return max(ranks, default=None)

    def of_sizes_alone(self) -> AttentionCall:
        """This call with q, k and v that have their sizes and take no memory."""
        q, k, v = (x.new_zeros(1).expand(x.shape) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def of_heads(self, heads: list[int]) -> AttentionCall:
        """This call for some of its query heads; every one gets its own k and v."""
        own = [head // self.groups for head in heads]
        args = self.args
        if isinstance(args.scale, Tensor):
            args = replace(args, scale=args.scale[heads])
        return replace(
            self,
            q=self.q[..., heads, :, :],
            k=self.k[..., own, :, :],
            v=self.v[..., own, :, :],
            bias=self.bias.select_heads(heads),
            args=args,
        )

    def of_first_entry(self) -> AttentionCall:
        """This call for the first entry of its outermost dimension, where nothing else has it."""
        batch = self.batch
        mask = self.args.key_mask
        others = [len(self.bias.batch_shape()), 0 if mask is None else mask.dim() - 1]
        start = self.args.query_start
        others.append(start.dim() if isinstance(start, Tensor) else 0)
        if not batch or batch[0] == 1 or len(batch) in others:
            return self
        return replace(self, q=self.q[:1], k=self.k[:1], v=self.v[:1])


def resolve(
    terms: ScoreBiasModule, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
) -> AttentionCall:
    """What a call of `ScoreBiasModule.forward` comes to."""
    given_terms = {name: kwargs[name] for name in _OF_TERMS if name in kwargs}
    prepared, bound = terms.of_call(**given_terms)
    masks_only = all(isinstance(term, Regions) for term in kwargs.get("extra", ()))
    own = ("scale", "causal", "query_start", "key_mask", "cosine")
    defaults: dict[str, Any] = dict.fromkeys(own) | {"causal": False, "cosine": False}
    given = {name: kwargs[name] for name in own if name in kwargs}
    return AttentionCall(
        q,
        k,
        v,
        prepared.bias,
        check_arguments(q, k, v, **{**defaults, **given}),
        bound,
        terms.backend,
        masks_only and not kwargs.get("built"),
    )


@contextmanager
def attending(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Let something else compute the attention of all patched modules.

    Args:
        model: patched; it is as before afterwards.
        attend: see `Attend`.
    """
    replaced: list[ScoreBiasModule] = []
    try:
        for module in model.modules():
            if isinstance(module, PatchedAttention):
                terms: Any = module.score_bias
                terms.forward = _bound(attend, terms)
                replaced.append(terms)
        yield
    finally:
        for terms in replaced:
            del terms.forward  # the attribute of the instance; the class has its own


def _bound(attend: Attend, terms: ScoreBiasModule) -> Attend:
    def forward(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return attend(terms, q, k, v, kwargs)

    return forward


@dataclass(frozen=True, eq=False)
class CallGroup:
    """Sites whose calls are alike.

    Attributes:
        sites: names of their modules.
        terms: of the first site.
        call: of the first site.
        kwargs: keyword arguments of `ScoreBiasModule.forward` in that call.
    """

    sites: list[str]
    terms: ScoreBiasModule
    call: AttentionCall
    kwargs: dict[str, Any]


def call_groups(model: nn.Module, batch: Batch) -> tuple[list[CallGroup], list[str]]:
    """The first attention call of each patched module of a model, alike ones together.

    Returns:
        The groups, and the names of modules that did not call the operator with these inputs.
    """
    names = {
        id(module.score_bias): name
        for name, module in model.named_modules()
        if isinstance(module, PatchedAttention)
    }
    groups: dict[Hashable, CallGroup] = {}
    silent = dict(names)

    def attend(
        terms: ScoreBiasModule, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        if silent.pop(id(terms), None) is not None:
            call = resolve(terms, q, k, v, kwargs)
            # q, k and v are kept as they are: nobody writes into them
            group = groups.setdefault(_key(call), CallGroup([], terms, call, kwargs))
            group.sites.append(names[id(terms)])
        return ScoreBiasModule.forward(terms, q, k, v, **kwargs)

    with attending(model, attend):
        model(*batch.args, **batch.kwargs)
    return list(groups.values()), list(silent.values())


def _key(call: AttentionCall) -> Hashable:
    shapes = tuple(tuple(x.shape) for x in (call.q, call.k, call.v))
    args = call.args
    return (*shapes, call.kinds, call.rank, args.causal, args.cosine, args.key_mask is None)
