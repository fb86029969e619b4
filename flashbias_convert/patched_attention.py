"""The base class of patched attention modules: which forward runs, and when terms are stale."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .composed import Composed
from .errors import StaleTermsError, UsageError
from .modules import ScoreBiasModule
from .trained_terms import dropout_problem


@dataclass(frozen=True)
class Seal:
    """What the terms were made from, as it was then.

    Attributes:
        state: identities, versions and sizes.
        values: sums over the tensors.
        broken: known to be stale; holds until the terms are made or loaded again.
    """

    state: tuple[Hashable, ...] = ()
    values: tuple[str, ...] = ()
    broken: bool = False


BROKEN = Seal(broken=True)


class PatchedAttention(Composed):
    """Base of the classes that recipes supply for patched attention modules.

    A recipe subclasses it and writes `flashbias_forward` and `bias_sources`.

    In training mode the original forward runs, with its dropout and gradients; so it does while
    a bypassed child is in training mode (dropout that was switched on by hand). Where the terms
    themselves are trained, it never runs: its bias is not theirs.
    """

    #: names of children that the original forward calls and `flashbias_forward` does not
    bypassed: ClassVar[tuple[str, ...]] = ()
    #: names of attributes that count heads, where `parallel.shard_sites` may split them
    head_counts: ClassVar[tuple[str, ...]] = ()
    #: names of parameters and buffers with an entry, or a group of equal size, for every head
    head_values: ClassVar[tuple[str, ...]] = ()

    #: over how many processes the heads are split
    split_over: int = 1
    #: names of parameters that rest while the terms are trained
    resting: tuple[str, ...] = ()
    score_bias: ScoreBiasModule
    _seal: Seal

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

        Made anew where gradients flow to the source or could have changed it, and in compiled
        code, which does not look whether it has changed.
        """
        asks = torch.is_grad_enabled() and source.requires_grad
        if self.trains_terms or asks or torch.compiler.is_compiling():
            return make(source)
        kept, key = self.score_bias.sealed, (name, source.device)
        if key not in kept:
            with torch.inference_mode(False), torch.no_grad():
                kept[key] = make(source)
        return kept[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.runs_original():
            return self.original_forward(*args, **kwargs)
        if self._seal.broken:  # compiled code guards on this
            self.check_fresh()
        if not torch.compiler.is_compiling():
            self.check_fresh()
            self._check_gradients()
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

    def runs_original(self) -> bool:
        """Whether the original forward runs: in training, or while a bypassed child trains."""
        return not self.trains_terms and self._in_training()

    def _in_training(self) -> bool:
        children = [self._modules.get(name) for name in self.bypassed]
        return self.training or any(child is not None and child.training for child in children)

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

    def seal(self) -> None:
        """Declare that the terms belong to the weights and sizes as they are now."""
        sources = self.sealed_sources()
        self._seal = Seal(state_of(sources), values_of(sources))
        self.score_bias.awaits_load = False
        self.score_bias.sealed = {}
        self.score_bias.prepare()  # now, so that torch.compile finds it made
        self.score_bias.bound_scores(self.scale_bound())

    def sealed_sources(self) -> tuple[Tensor | Hashable, ...]:
        """What must not change: `bias_sources`, but for those that are trained beside the terms."""
        sources = self.bias_sources()
        if not self.trains_terms:
            return sources
        used = {id(source) for source in self.used_sources()}
        return tuple(source for source in sources if id(source) not in used)

    def is_stale(self) -> bool:
        """Whether weights or sizes have changed since the terms were made.

        Costs nothing where nothing was touched. Otherwise the values decide: a wrapper such as DDP
        writes the same ones again. Changes behind torch's back (fused optimizers, ``.data``) are
        seen by `compare_values`, and so are those of weights that a wrapper keeps elsewhere.
        """
        if self._seal.broken:
            return True
        sources = self.sealed_sources()
        state = state_of(sources)
        if state == self._seal.state:
            return False
        if not _same_sizes(sources, self._seal.state):
            return True
        if kept_elsewhere(self, sources):
            return False
        values = values_of(sources)
        if values != self._seal.values:
            return True
        self._seal = Seal(state, values)
        return False

    def compare_values(self) -> None:
        """Look at the numbers themselves: after training and after loading."""
        if self.is_stale() or self._seal.values != values_of(self.sealed_sources()):
            self._seal = BROKEN

    def train(self, mode: bool = True) -> Self:
        back_from_training = self.training and not mode
        if mode and self.trains_terms:  # here, too: compiled code does not look
            self._check_dropout()
        super().train(mode)
        if back_from_training:
            self.compare_values()
        return self

    def check_fresh(self) -> None:
        """Raise StaleTermsError if `is_stale`."""
        if not self.is_stale():
            return
        name = self.original_class.__name__
        if self.score_bias.awaits_load:
            raise StaleTermsError(
                f"the terms of this {name} have not been loaded yet", "call load_state_dict first"
            )
        raise StaleTermsError(
            f"the weights, window or input size of this {name} have changed since it was converted",
            "run unpatch_model and patch_model again",
        )

    # -- moves, loads and copies -----------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        stale = self.is_stale()
        moved = super()._apply(fn, recurse)
        if not stale:  # a move or a cast changes tensors, but not what they say
            self.seal()
        return moved

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """As of any module, but the layout of stale terms is zeros: see `seal_if_loaded`."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if self.training:  # fused optimizers leave no trace but the values
            self.compare_values()
        if self.is_stale() and not self.score_bias.awaits_load:
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            key = f"{prefix}score_bias.layout"
            state[key] = torch.zeros_like(state[key])
        return state

    def _load_from_state_dict(self, *args: Any) -> None:
        self.score_bias.just_loaded = False
        super()._load_from_state_dict(*args)

    def _copied_state(self) -> dict[str, Any]:
        return {**self.__dict__, "_seal": BROKEN if self.is_stale() else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state["_seal"] is None:  # at once: the copy may be trained before it is asked
            self.seal()


def seal_if_loaded(module: nn.Module, _: Any) -> None:
    """Load hook of patched modules: weights that came with their terms are fresh.

    Unless they were stale when they were saved.
    """
    assert isinstance(module, PatchedAttention)
    if module.score_bias.just_loaded and module.score_bias.restore_layout():
        module._seal = BROKEN
        module.score_bias.awaits_load = False
    elif module.score_bias.just_loaded:
        module.seal()
    elif not module.score_bias.awaits_load:
        module.compare_values()


def state_of(sources: tuple[Tensor | Hashable, ...]) -> tuple[Hashable, ...]:
    """Identities, versions and sizes; costs nothing."""
    return tuple(_identity(s) if isinstance(s, Tensor) else s for s in sources)


def _same_sizes(sources: tuple[Tensor | Hashable, ...], state: tuple[Hashable, ...]) -> bool:
    """Whether what is no tensor is still as in `state`."""
    if len(sources) != len(state):
        return False
    pairs = zip(sources, state, strict=True)
    return all(isinstance(source, Tensor) or source == then for source, then in pairs)


def kept_elsewhere(module: nn.Module, sources: tuple[Tensor | Hashable, ...]) -> bool:
    """Whether a wrapper puts the sources in their place for a moment, or keeps parts of them.

    That is FSDP, which marks the modules that it manages, a DTensor, and the hooks of accelerate
    while a weight is offloaded.
    """
    tensors = [source for source in sources if isinstance(source, Tensor)]
    if getattr(module, "_is_fsdp_managed_module", False) or any(map(_is_distributed, tensors)):
        return True
    hooked = any(hasattr(child, "_hf_hook") for child in module.modules())
    return hooked and any(tensor.is_meta for tensor in tensors)


def _is_distributed(tensor: Tensor) -> bool:
    # by name: torch.distributed may not be there
    return type(tensor).__module__.startswith("torch.distributed.")


def _identity(tensor: Tensor) -> Hashable:
    if _is_distributed(tensor):
        return (id(tensor), _identity(tensor.to_local()))  # type: ignore[attr-defined]
    # the address tells of `parameter.data = ...`, which the version does not count
    return (id(tensor), tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)


def values_of(sources: tuple[Tensor | Hashable, ...]) -> tuple[str, ...]:
    """A few sums over each tensor, as text so that NaN equals NaN; reads the values."""
    sums = []
    for tensor in sources:
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            if _is_distributed(tensor):  # all processes come here: they load or train together
                tensor = tensor.full_tensor()  # type: ignore[attr-defined]
            wide = tensor.detach().double().flatten()
            weights = torch.linspace(0.5, 1.5, len(wide), dtype=wide.dtype, device=wide.device)
            sums.append(repr([float((wide * weights).sum()), float(wide.square().sum())]))
    return tuple(sums)


@cache
def _warn_no_gradients() -> None:
    """Once per process: gradients flow, but not to what the bias was made from."""
    warnings.warn(
        "a converted attention module runs in eval mode with gradients enabled: the parameters "
        "of its bias get no gradient from it; use torch.no_grad() for inference, or train() to "
        "train through the original forward",
        stacklevel=4,
    )
