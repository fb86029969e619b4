"""The base class of patched attention modules: which forward runs, and when terms are stale."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .composed import Composed
from .errors import StaleTermsError, UsageError
from .modules import ScoreBiasModule
from .seals import (
    BROKEN,
    UNMATCHED,
    Seal,
    differ,
    kept_elsewhere,
    rows_of,
    same_sizes,
    saved_rows,
    state_of,
    values_of,
    vouches,
)
from .split_layers import require_layout
from .tracing import is_traced
from .trained_terms import dropout_problem


class PatchedAttention(Composed):
    """Base of the classes that recipes supply for patched attention modules.

    A recipe subclasses it and writes `flashbias_forward` and `bias_sources`.

    In training mode the original forward runs, with its dropout and gradients; so it does while
    a bypassed child is in training mode (dropout that was switched on by hand). Where the terms
    themselves are trained, it never runs: its bias is not theirs.
    """

    #: names of children that the original forward calls and `flashbias_forward` does not
    bypassed: ClassVar[tuple[str, ...]] = ()
    #: names of children that it does not call either, but parts of which it does
    taken_apart: ClassVar[tuple[str, ...]] = ()
    #: whether its heads wait for each other, so that each has a call of its own,
    #: ``self.score_bias(..., heads=(head,))``
    head_by_head: ClassVar[bool] = False
    #: names of attributes that count heads, where `parallel.shard_sites` may split them
    head_counts: ClassVar[tuple[str, ...]] = ()
    #: names of parameters and buffers with an entry, or a group of equal size, for every head
    head_values: ClassVar[tuple[str, ...]] = ()
    #: names of children that make q, k and v at once, and of how many outputs one after the other:
    #: 3 for all queries, then all keys, then all values; 1 where rows go head by head
    packed: ClassVar[Mapping[str, int]] = MappingProxyType({})

    #: over how many processes the heads are split
    split_over: int = 1
    #: names of parameters that rest while the terms are trained
    resting: tuple[str, ...] = ()
    #: what is still to be written of this class; until nothing is, no module is patched with it
    unfinished: ClassVar[str] = ""
    score_bias: ScoreBiasModule
    _seal: Seal
    #: what the seal says of that; see `TracedBias` on what compiled code looks at
    _is_broken: bool = False

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward with its scores, bias, mask and softmax replaced."""
        raise NotImplementedError

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        """Everything that the terms were made from: parameters, buffers, sizes."""
        raise NotImplementedError

    def used_sources(self) -> tuple[Tensor, ...]:
        """Those of `bias_sources` that `flashbias_forward` reads itself, beside the terms."""
        return ()

    def scale_bound(self) -> float | None:
        """What no |scale * q k| exceeds, if the scores have such a bound (cosine attention).

        What it is made from belongs to `bias_sources`.
        """
        return None

    def sealed(self, name: str, source: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """What a call needs of one of the `bias_sources`, made once: they must not change.

        Made anew where gradients flow to the source or could have changed it, and in code that is
        compiled or traced, which does not look whether it has changed.
        """
        asks = torch.is_grad_enabled() and source.requires_grad
        if self.trains_terms or asks or is_traced():
            return make(source)
        kept, key = self.score_bias.sealed, (name, source.device)
        if key not in kept:
            with torch.inference_mode(False), torch.no_grad():
                kept[key] = make(source)
        return kept[key]

    def __setattr__(self, name: str, value: Any) -> None:
        """As of any module; another window or input size is noticed at once.

        Compiled code looks at nothing but the seal, and a map of as many tokens fits its shapes.
        """
        super().__setattr__(name, value)
        if isinstance(value, Seal):
            self._note_seal()
        elif isinstance(value, int | tuple | list) and not isinstance(value, bool):
            self._break_at_other_sizes()

    def _note_seal(self) -> None:
        broken = self._seal.broken
        if broken is not self._is_broken:  # what is set anew may be compiled anew
            self.__dict__["_is_broken"] = broken

    def _break_at_other_sizes(self) -> None:
        seal = self.__dict__.get("_seal")
        if seal is None or seal.broken:  # not patched yet, or refused already
            return
        if not same_sizes(self.sealed_sources(), seal.state):
            self._break()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.runs_original():
            return self.original_forward(*args, **kwargs)
        if self._is_broken:  # compiled code guards on this
            self.check_fresh()
        if not torch.compiler.is_compiling():
            self.check_fresh()
            self._check_gradients()
            if self.split_over > 1:  # its layers may have been split after its terms
                self.require_layout()
        return self.flashbias_forward(*args, **kwargs)

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computed before it was patched.

        Raises:
            UsageError: its heads are split over processes, which the original does not know, or
                its terms are trained, which are not the original's bias.
        """
        if self.trains_terms:
            raise UsageError(
                f"a call of this {self.original_class.__name__} asks for its original forward, "
                "which does not know the bias that was trained",
                "do not ask for attention weights, nor pass masks of your own",
            )
        if self.split_over > 1:
            raise UsageError(
                f"the heads of this {self.original_class.__name__} are split over "
                f"{self.split_over} processes, so its original forward cannot run",
                "serve it in evaluation mode, without attention weights and masks of your own",
            )
        return super().original_forward(*args, **kwargs)

    def require_layout(self) -> None:
        """Raise UsageError if a layer of `packed` was split in a way that does not fit it."""
        require_layout(self, self.packed, self.original_class.__name__)

    def runs_original(self) -> bool:
        """Whether the original forward runs: in training, or while a bypassed child trains."""
        return not self.trains_terms and self._in_training()

    @classmethod
    def composed_methods(cls) -> dict[str, Callable[..., Any]]:
        for name in ("runs_original", "_in_training", "trains_terms"):
            if getattr(cls, name) is not getattr(PatchedAttention, name):
                return {}  # the recipe has one of its own
        return {"runs_original": _runs_original_beside(cls.bypassed)}

    def _in_training(self) -> bool:
        return _trains(self, self.bypassed)

    @property
    def trains_terms(self) -> bool:
        """Whether the terms are parameters, which have left their decomposition behind."""
        return self.score_bias.trained

    def _check_dropout(self) -> None:
        problem = dropout_problem(self, self.bypassed)
        if problem is not None:
            raise UsageError(f"{self.original_class.__name__}: {problem}")

    def _check_gradients(self) -> None:
        if self.trains_terms:
            if self._in_training():
                self._check_dropout()
            return
        if torch.is_grad_enabled() and any(
            s.requires_grad for s in self.bias_sources() if isinstance(s, Tensor)
        ):
            _warn_no_gradients()

    # -- staleness -------------------------------------------------------------------------

    def seal(self, *, prepare: bool = True) -> None:
        """Declare that the terms belong to the weights and sizes as they are now.

        Args:
            prepare: look at the terms and have their packed forms made, now, so that torch.compile
                finds them; not of placeholders, which need not be what their kinds allow.
        """
        sources = self.sealed_sources()
        self._seal = Seal.of(sources)
        self.score_bias.awaits_load = False
        rows = rows_of(sources, self._seal.values, self.score_bias.rows())
        self.score_bias.set_made_from(saved_rows(self, sources, rows))
        self.score_bias.sealed = {}
        if prepare:
            self.score_bias.prepare(self.head_by_head)
            self.score_bias.bound_scores(self.scale_bound())

    def seal_if_matched(self) -> None:
        """`seal` terms that were loaded, unless they say that they belong to other weights."""
        terms = self.score_bias
        if not terms.rows_loaded or vouches(terms.rows(), self.sealed_sources()):
            self.seal()
        else:
            self._seal = UNMATCHED
            self.score_bias.awaits_load = False

    def sealed_sources(self) -> tuple[Tensor | Hashable, ...]:
        """What must not change: `bias_sources`, but for those that are trained beside the terms."""
        sources = self.bias_sources()
        if not self.trains_terms:
            return sources
        used = {id(source) for source in self.used_sources()}
        return tuple(source for source in sources if id(source) not in used)

    def is_stale(self) -> bool:
        """Whether weights or sizes have changed since the terms were made.

        Costs next to nothing where nothing was touched. Otherwise the values decide: a wrapper
        such as DDP writes the same ones again. Changes behind torch's back (fused optimizers,
        ``.data``) are seen on a CPU, up to a size; elsewhere by `look` and `compare_values`. Those
        of weights that a wrapper keeps elsewhere are seen by `compare_values`.
        """
        seal = self._seal
        if seal.broken:
            return True
        sources = self.sealed_sources()
        if seal.is_untouched(state_of(sources)):
            return False
        if not same_sizes(sources, seal.state):
            self._seal = seal.in_doubt()
            return True
        if kept_elsewhere(self, sources):
            return False
        if values_of(sources) != seal.values:
            # an adapter that is merged brings the old parameter back, with other numbers
            self._seal = seal.in_doubt()
            return True
        self._seal = seal.renewed(sources)
        return False

    def is_unmatched(self) -> bool:
        """Whether the terms say that they belong to other weights than were loaded with them."""
        return self._seal.unmatched

    def look(self) -> bool:
        """`is_stale` by the numbers themselves, where this process has them all by itself."""
        if not self._seal.broken and not kept_elsewhere(self, self.sealed_sources()):
            self._seal = self._seal.in_doubt()
        return self.is_stale()

    def compare_values(self) -> None:
        """Look at the numbers themselves: after training and after loading.

        All processes that have parts of a source must come here together.
        """
        if self.is_stale() or differ(self._seal.values, values_of(self.sealed_sources())):
            self._break()

    def _break(self) -> None:
        if not self._seal.broken:
            self._seal = BROKEN

    def _stale_seal(self) -> Seal | None:
        if not self.look():
            return None
        return self._seal if self._seal.broken else BROKEN

    def train(self, mode: bool = True) -> Self:
        back_from_training = self.training and not mode
        if mode and self.trains_terms:  # here, too: compiled code does not look
            self._check_dropout()
        super().train(mode)
        if back_from_training:
            self.compare_values()
        elif not mode and self.look():
            self._break()  # compiled code looks at this alone
        return self

    def check_fresh(self, *, by_values: bool = False) -> None:
        """Raise StaleTermsError if `is_stale`, or, by values, if `look` says so."""
        if not (self.look() if by_values else self.is_stale()):
            return
        name = self.original_class.__name__
        if self.score_bias.awaits_load:
            raise StaleTermsError(
                f"the terms of this {name} have not been loaded yet", "call load_state_dict first"
            )
        if self._seal.unmatched:
            raise StaleTermsError(
                f"this {name} was loaded with terms that were made from other weights",
                "load a state dict that has both, or run unpatch_model and patch_model again",
            )
        raise StaleTermsError(
            f"the weights, window or input size of this {name} have changed since it was converted",
            "run unpatch_model and patch_model again",
        )

    # -- moves, loads and copies -----------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        stale, was_meta = self.look(), self.score_bias.layout.is_meta
        moved = super()._apply(fn, recurse)
        if self.score_bias.is_empty(was_meta):
            self.score_bias.forget_loads()
            self.await_load()
        elif not stale:  # a move or a cast changes tensors, but not what they say
            self.seal()
        return moved

    def await_load(self) -> None:
        """Refuse to compute until a state dict has filled the terms."""
        self._seal = BROKEN
        self.score_bias.awaits_load = True

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """As of any module, but the layout of stale terms is zeros: see `seal_if_loaded`."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if self.training:  # fused optimizers leave no trace but the values
            self.compare_values()
        if self.look():
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            key = f"{prefix}score_bias.layout"
            state[key] = torch.zeros_like(state[key])
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        terms = self.score_bias
        terms.just_loaded = terms.partly_loaded = False
        own = (name for name, _ in self.named_parameters() if not name.startswith("score_bias."))
        terms.note_weights(name for name in own if prefix + name in state_dict)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _copied_state(self) -> dict[str, Any]:
        return {**self.__dict__, "_seal": self._stale_seal()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state["_seal"] is None:  # at once: the copy may be trained before it is asked
            self.seal()
        else:
            self._note_seal()


def _runs_original_beside(bypassed: tuple[str, ...]) -> Callable[[PatchedAttention], bool]:
    """`runs_original` of a class that bypasses children of these names."""

    def runs_original(self: PatchedAttention) -> bool:
        return not self.score_bias.trained and _trains(self, bypassed)

    return runs_original


def _trains(module: nn.Module, bypassed: tuple[str, ...]) -> bool:
    """Whether a module, or a child of it of one of these names, is in training mode."""
    children = [module._modules.get(name) for name in bypassed]
    return module.training or any(child is not None and child.training for child in children)


def seal_if_loaded(module: nn.Module, _: Any) -> None:
    """Load hook of patched modules: weights that came with their terms are fresh.

    Unless they were stale when they were saved, or the terms say that they were made from others:
    who updates ``model.state_dict()`` and loads that brings old terms along. Where only some of
    them came, the module waits for the others.
    """
    assert isinstance(module, PatchedAttention)
    terms = module.score_bias
    if terms.partly_loaded:
        module.await_load()
        terms.check_part()
    elif terms.just_loaded and terms.restore_layout():
        module._seal = BROKEN
        terms.awaits_load = False
    elif terms.just_loaded or module._seal.unmatched:  # weights and terms in either order
        module.seal_if_matched()
    elif not terms.awaits_load:
        module.compare_values()


@cache
def _warn_no_gradients() -> None:
    """Once per process: gradients flow, but not to what the bias was made from."""
    warnings.warn(
        "a converted attention module runs in eval mode with gradients enabled: the parameters "
        "of its bias get no gradient from it; use torch.no_grad() for inference, or train() to "
        "train through the original forward",
        stacklevel=4,
    )
