"""The module that holds a site's terms, as buffers or parameters, and attends with them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import SLACK, PreparedBias, bias_bound, flashbias_attention
from .attention.backends import BACKENDS
from .attention.bounds import LARGEST_BOUND
from .attention.prepared import Form
from .attention.traced_bias import TracedBias
from .builder_module import BuilderModule
from .builders import Builder, find_builder, with_builders
from .common_terms import common_bias
from .errors import UsageError
from .mask_memo import MaskMemo
from .pair_memory import PairMemory
from .saved_terms import SavedTerms
from .term_tensors import TermTensors
from .terms import Lookup, Regions, RelativeTable, ScoreBias, Term
from .tracing import is_traced
from .trained_terms import can_learn, in_full_precision

#: what is kept of the terms: without which kinds, and of which heads; None for all of them
Part = tuple[tuple[str, ...], tuple[int, ...] | None]


class ScoreBiasModule(SavedTerms):
    """Holds a site's terms and computes attention with them.

    It is the submodule `score_bias` of a patched attention module; its state-dict keys are
    ``<site>.score_bias.<term>.<tensor>`` and those of `SavedTerms`.

    Args:
        bias: the terms; their tensors are copied.
        backend: "auto", "triton", "sdpa" or "eager", see `flashbias_attention`.
        builders: names of the builders that calls may use, see `builders`.
        modules: builders with weights of their own, by the names that calls use; copied.
        trained: floating-point tensors of the terms are fp32 parameters, see `patch_model`; else
            all of them are buffers.
    """

    #: set to False, it trains with atomics where they are faster, see `flashbias_attention`; a file
    #: of the model does not keep it
    deterministic: bool = True
    #: whether a call brought another index than its table is for, see `HandedIndexAttention`
    met_another_index: bool = False

    def __init__(
        self,
        bias: ScoreBias,
        backend: str = "auto",
        builders: Sequence[str] = (),
        modules: Mapping[str, BuilderModule] | None = None,
        trained: bool = False,
    ) -> None:
        if backend not in BACKENDS:
            raise UsageError(f"backend must be one of {BACKENDS}, got {backend!r}")
        if trained:
            bias = in_full_precision(bias)
        super().__init__(with_builders(bias.spec(), builders, modules, trained), bias.device)
        self.backend = backend
        #: whether the terms are parameters, and no longer follow from the module's own bias
        self.trained = trained
        self.builders = {name: find_builder(name) for name in builders}
        # dictionaries, for the sake of compiled code, see `TracedBias`
        self._kinds = {term.kind: True for term in bias.terms}
        self._learnt = {t.kind: True for t in bias.terms if trained and can_learn(t)}
        #: whether the terms are placeholders that a state dict must fill
        self.awaits_load = False
        #: what no score of this site exceeds, masks aside, if that is known
        self.score_bound: float | None = None
        #: the same as calls say it: compiled code is for all sites whose scores are small, or not
        self._call_bound: float | None = None
        self.mask_memo = MaskMemo()
        #: what the module around it made of its bias sources, see `PatchedAttention.sealed`
        self.sealed: dict[tuple[str, torch.device], Tensor] = {}
        #: keeps what was made of a pair representation, inside `factors_once`
        self.pair_memory: PairMemory | None = None
        #: which heads this process keeps, and of how many, see `parallel.shard_sites`
        self._own_heads: tuple[tuple[int, ...], int] | None = None
        self._prepared: dict[Part, PreparedBias] = {}
        #: the tensors that these were made of
        self._made_of: tuple[Tensor | None, ...] = ()
        #: and their device
        self._made_on: str | None = None
        #: of what is prepared, all that compiled code reads, see `TracedBias`
        self.flat: dict[Part, dict[Any, Any]] = {}
        #: forms that compiled code looks for, by part of the terms, and by device
        self._traced: dict[tuple[Part, torch.device], set[Form]] = {}
        self._forget()
        for name, term in zip(bias.term_names(), bias.terms, strict=True):
            self.add_module(name, TermTensors(term, trained))
        for name, module in (modules or {}).items():
            if name in self.builders or hasattr(self, name):
                raise ValueError(f"a builder cannot be called {name!r}")
            self.add_module(name, copy.deepcopy(module))

    def _forget(self) -> None:
        """Drop everything that was derived from the tensors."""
        self._drop_prepared()
        self.sealed = {}
        self.mask_memo = MaskMemo(self.mask_memo.doubtful)

    def _drop_prepared(self) -> None:
        """Drop what was made of the terms alone."""
        for part, made in self._prepared.items():
            if made.traced:
                self._traced[part, made.bias.device] = made.traced
        self._looked_at = False
        self._prepared, self.flat, self._made_of, self._made_on = {}, {}, (), None
        self._last_joined: tuple[PreparedBias, tuple[Term, ...], PreparedBias] | None = None

    def spec(self) -> dict[str, Any]:
        """See `ScoreBias.spec`; dtypes are those of now."""
        builders = tuple(self.builders)
        return with_builders(self.bias.spec(), builders, self.builder_modules(), self.trained)

    def builder_modules(self) -> dict[str, BuilderModule]:
        """The builders with weights, by name."""
        return {k: m for k, m in self._modules.items() if isinstance(m, BuilderModule)}

    def _builder(self, name: str) -> Builder | BuilderModule:
        module = self._modules.get(name)
        return module if isinstance(module, BuilderModule) else self.builders[name]

    @property
    def bias(self) -> ScoreBias:
        """The terms as they are now."""
        return self.prepared().bias

    def prepared(
        self,
        without: tuple[str, ...] = (),
        heads: tuple[int, ...] | None = None,
        device: torch.device | None = None,
    ) -> PreparedBias | TracedBias:
        """The terms with their kernel-ready forms, made once per move, cast or load.

        Made anew in every call while the terms are parameters: fused optimizers leave no trace of
        what they change, and averages of weights change parameters that ask for no gradients.

        Args:
            without: kinds of terms to leave out.
            heads: of which heads, in that order; None for all.
            device: where they are needed, if the caller knows. A trace asks for nothing else, and
                without it looks at one of the module's own tensors.

        Raises:
            ValueError: the tensors were loaded from a state dict of other terms, or a head that
                the site does not have.
        """
        kinds = tuple(kind for kind in without if kind in self._kinds) if without else ()
        part = (kinds, heads)
        if self.trained and self.learns():
            return self._prepare(*part)
        if torch.compiler.is_compiling():
            # a trace has tensors of its own: it only asks where they are needed
            device = self.layout.device if device is None else device
            if self._made_on == str(device) and part in self.flat:
                return TracedBias(self, part)
        known = self._prepared.get(part)
        if not self._is_of_now(device):
            known = None
            if not is_traced():
                self._drop_prepared()
        if known is not None:
            return known
        made = self._prepare(*part)
        # a graph that is being traced must not change what the next call finds: it would be
        # compiled a second time
        if not is_traced():
            made.make_forms(self._traced.get((part, made.bias.device), ()))
            self._prepared[part] = made
            if made.flat:
                self.flat[part], made.held_by = made.flat, (weakref.ref(self), part)
            self._made_of, self._made_on = tuple(self._held()), str(self.layout.device)
        return made

    def kept(self, which: Part) -> PreparedBias:
        """What is prepared of a part of the terms, if that is."""
        return self._prepared[which]

    def _is_of_now(self, device: torch.device | None) -> bool:
        """Whether the tensors are still those that forms were made of.

        accelerate, `torch.func.functional_call` and the replicas of `nn.DataParallel` put others
        into the dictionaries of modules.
        """
        if torch.compiler.is_compiling():  # `prepared` knows where they are needed
            return self._made_on is None or self._made_on == str(device)
        # a list is made faster than a generator is gone through
        return not self._prepared or _are(self._held(), self._made_of)

    def _held(self) -> list[Tensor | None]:
        return [
            tensor
            for terms in self._modules.values()
            if isinstance(terms, TermTensors)
            for tensor in terms._buffers.values()
        ]

    def prepare(self, one_by_one: bool = False) -> None:
        """Prepare everything that calls without terms of their own ask for.

        Args:
            one_by_one: whether each call is for one head.
        """
        self.prepared()
        self.prepared((Regions.kind,))  # maps of one window bring no mask
        for head in range(self._spec["num_heads"] if one_by_one else 0):
            self.prepared(heads=(head,))

    def learns(self) -> bool:
        """Whether the terms are parameters."""
        return self.trained and any(
            len(terms._parameters) > 0  # Dynamo of torch 2.11 traces no bool of a dictionary
            for terms in self._modules.values()
            if isinstance(terms, TermTensors)
        )

    def freeze(self) -> None:
        """Turn the parameters of the terms into buffers; they stay what was trained."""
        for terms in self._modules.values():
            if isinstance(terms, TermTensors):
                terms.freeze()
        self._forget()
        self.prepared()

    def _prepare(self, without: tuple[str, ...], heads: tuple[int, ...] | None) -> PreparedBias:
        tensors = dict(self.named_buffers())
        if self.trained:
            tensors |= dict(self.named_parameters())
        looked_at = self._looked_at
        if not looked_at:
            self.check_layout()
        bias = ScoreBias.from_state(self._spec, tensors)
        if not looked_at and not torch.compiler.is_compiling() and bias.device.type != "meta":
            _check_codes(bias.terms)
            self._looked_at = True
        kept = tuple(term for term in bias.terms if term.kind not in without)
        bias = ScoreBias(kept, bias.num_heads)
        return PreparedBias(bias if heads is None else self._selected(bias, heads))

    def _selected(self, bias: ScoreBias, heads: tuple[int, ...]) -> ScoreBias:
        if self.trained or is_traced():
            return bias.select_heads(heads)
        with torch.inference_mode(False), torch.no_grad():  # calls in every mode find it
            return bias.select_heads(heads)

    def bound_scores(self, scale_bound: float | None) -> None:
        """Work out `score_bound`; reads the terms. Terms that are trained have no bound.

        Args:
            scale_bound: what no |scale * q k| exceeds, or None if that is not known.
        """
        known = scale_bound is not None and not any(buffer.is_meta for buffer in self.buffers())
        known = known and not self.trained
        bound = bias_bound(self.bias) if known else None
        both = None if bound is None or scale_bound is None else SLACK * scale_bound + bound
        self.score_bound = both
        self._call_bound = LARGEST_BOUND if both is not None and both <= LARGEST_BOUND else None

    def planned_regions(self) -> Regions | None:
        """The term that stands for a mask, if there is one."""
        return next((t for t in self.bias.terms if isinstance(t, Regions)), None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
        """`flashbias_attention` of q, k and v with this site's terms.

        Args:
            q, k, v: shapes (*batch, H, N, D), (*batch, H, M, D) and (*batch, H, M, Dv), where H
                counts the heads of this call.
            built: inputs of the builders of this call, by their names.
            extra: terms of this call only, such as a mask that depends on the input.
            without: kinds of terms that this call leaves out.
            heads: which heads of the site q, k and v belong to, in their order, where a head
                waits for another; None for all of them. Terms that come with the call, built or
                extra, are for the heads of the call.
            **call: these, and keyword arguments of `flashbias_attention`.

        Returns:
            Tensor of shape (*batch, H, N, Dv).

        Raises:
            UsageError: the call leaves out terms that were trained: there is nothing else that
                knows what they have learnt.
        """
        # compiled code would look up the defaults of a method in its class, in every layer and call
        return _attend(self, q, k, v, **call)

    def of_call(
        self,
        built: Mapping[str, dict[str, Any]] | None = None,
        extra: Sequence[Term] = (),
        without: tuple[str, ...] = (),
        heads: tuple[int, ...] | None = None,
        device: torch.device | None = None,
    ) -> tuple[PreparedBias | TracedBias, float | None]:
        """The terms of one call, see `forward`, and what no score exceeds, if that is known."""
        if built and not extra and heads is None:
            common = self._common(built, without)
            if common is not None:
                return common, None
        for name, inputs in (built or {}).items():
            builder = self._builder(name)
            extra, without = (*extra, builder.make(**inputs)), without + builder.replaces
        # an owner makes terms for the heads of all processes
        if extra and self._own_heads is not None and heads is None:
            extra = tuple(self._own_part(term) for term in extra)
        prepared = self.prepared(without, heads, device)
        # masks aside, the bound holds with them, too
        bound = self._call_bound if all(isinstance(term, Regions) for term in extra) else None
        if extra:
            prepared = self._joined(prepared, tuple(extra))
        return prepared, bound

    def _common(
        self, built: Mapping[str, dict[str, Any]], without: tuple[str, ...]
    ) -> PreparedBias | None:
        """The only term of this call, if all layers have it in common; else None."""
        (name, inputs), *others = built.items()
        builder = self._builder(name)
        if others or self._own_heads is not None or isinstance(builder, BuilderModule):
            return None
        replaced = (*without, *builder.replaces)
        if not all(kind in replaced for kind in self._kinds):
            return None
        return common_bias(name, builder, inputs, self._spec["num_heads"])

    def keep_heads(self, heads: Sequence[int], total: int) -> None:
        """Take these heads, of `total`, of the terms that come with calls, as of the own ones."""
        self._own_heads = (tuple(heads), total)

    def _own_part(self, term: Term) -> Term:
        assert self._own_heads is not None
        heads, total = self._own_heads
        if term.num_own_heads() != total or total == 1:
            return term
        chosen = term.select_heads(heads)
        assert chosen is not None  # terms of a call are for all heads
        return chosen

    def _joined(self, own: PreparedBias | TracedBias, extra: tuple[Term, ...]) -> PreparedBias:
        """Own terms and those of a call; kept while masks stay the same objects."""
        if isinstance(own, TracedBias):
            return own.joined(extra)
        last = self._last_joined  # read once: another thread may bring another mask
        if last is not None and last[0] is own and _are(last[1], extra):
            return last[2]
        joined = own.joined(extra)
        if all(isinstance(term, Regions) for term in extra) and not is_traced():
            self._last_joined = (own, extra, joined)
        return joined

    # -- staying in step with the tensors --------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScoreBiasModule:
        super()._apply(fn, recurse)
        self._forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        memo = MaskMemo(self.mask_memo.doubtful)
        forgotten: dict[str, Any] = {
            "_prepared": {},
            "flat": {},
            "_made_of": (),
            "_made_on": None,
            "_traced": {},
            "_last_joined": None,
            "sealed": {},
            "pair_memory": None,
            "mask_memo": memo,
        }
        return {**self.__dict__, **forgotten}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"flat": {}, **state})  # earlier releases had none

    def extra_repr(self) -> str:
        return f"num_heads={self._spec['num_heads']}, backend={self.backend!r}"


def _attend(
    terms: ScoreBiasModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    built: Mapping[str, dict[str, Any]] | None = None,
    extra: Sequence[Term] = (),
    without: tuple[str, ...] = (),
    heads: tuple[int, ...] | None = None,
    **options: Any,
) -> Tensor:
    """See `ScoreBiasModule.forward`."""
    lost = [kind for kind in without if kind in terms._learnt]
    if lost:
        raise UsageError(
            f"this call needs another bias than the {', '.join(sorted(lost))} that was trained",
            "call the model with the input size that it was patched for",
        )
    prepared, bound = terms.of_call(built, extra, without, heads, q.device)
    # without terms there is no tensor that tells on which device zeros would be added
    added = None if prepared.is_empty else prepared
    options = {"backend": terms.backend, "deterministic": terms.deterministic, **options}
    return flashbias_attention(q, k, v, added, score_bound=bound, **options)


def _are(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _check_codes(terms: Sequence[Term]) -> None:
    """A kernel trusts codes; a wrong one would read outside its table. Reads them, and regions."""
    for term in terms:
        if torch.compiler.is_compiling():
            return
        if isinstance(term, RelativeTable | Lookup | Regions):
            term.check_codes()
