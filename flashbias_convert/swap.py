"""Turning one module into its patched form and back: the class, one submodule, and a seal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .builder_module import BuilderModule
from .composed import Composed, compose
from .errors import UsageError
from .hooks import at_hand, has_foreign_forward, swap_class
from .modules import ScoreBiasModule
from .patched_attention import PatchedAttention, seal_if_loaded
from .patched_owner import PatchedOwner, aside
from .seals import Seal
from .terms import ScoreBias
from .trained_terms import dropout_problem, set_to_rest, wake

#: name of the submodule that holds the terms of a patched module
SUBMODULE = "score_bias"


def patched_modules(model: nn.Module) -> list[PatchedAttention]:
    """The patched modules of a model, each once, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, PatchedAttention)]


def device_of(module: nn.Module) -> torch.device:
    """Where the first parameter of a module is; the CPU without one."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before it was patched."""
    return module.original_class if isinstance(module, Composed) else type(module)


def refusal(module: nn.Module) -> str | None:
    """Why a module cannot be patched, or None if it can."""
    if not isinstance(module, PatchedAttention) and hasattr(module, SUBMODULE):
        return f"the module already has an attribute called {SUBMODULE!r}"
    return owner_refusal(module)


def owner_refusal(module: nn.Module) -> str | None:
    """Why an owner cannot be patched, or None if it can."""
    if has_foreign_forward(module):
        return "its forward was replaced on the instance; patch before that is done"
    return None


def patched_owners(model: nn.Module) -> list[PatchedOwner]:
    """The patched owners of a model, each once, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, PatchedOwner)]


def patch_module(
    module: nn.Module,
    recipe_class: type[PatchedAttention],
    bias: ScoreBias,
    *,
    backend: str = "auto",
    builders: Sequence[str] = (),
    modules: Mapping[str, BuilderModule] | None = None,
    awaits_load: bool = False,
    trained: bool = False,
) -> None:
    """Give a module its patched class and its terms, in place; on an error it stays as it was.

    Args:
        module: an attention module that is not patched.
        recipe_class: the class that the module's recipe supplies.
        bias: the terms; their tensors are copied to where the module is.
        backend: see `flashbias_attention`.
        builders: names of the builders that the class uses.
        modules: builders with weights that the class uses; copied.
        awaits_load: the terms are placeholders; until a state dict has filled them, the module
            refuses to compute.
        trained: the terms become parameters, and what they were made from rests.

    Raises:
        UsageError: the module cannot be patched, see `refusal`, its terms cannot be trained, or
            the class is `unfinished`.
    """
    reason = refusal(module)
    if reason is None and trained and not awaits_load:
        reason = dropout_problem(module, recipe_class.bypassed)
    if reason:
        raise UsageError(reason)
    if recipe_class.unfinished:
        raise UsageError(
            f"{recipe_class.__name__} is not finished: {recipe_class.unfinished}",
            f"do so in its recipe, and take `unfinished` out of {recipe_class.__name__}",
        )
    terms = ScoreBiasModule(bias, backend, builders, modules, trained)
    terms.train(module.training)
    with at_hand([module]):
        patched = _patch(module, recipe_class, terms, filled=not awaits_load)
    if awaits_load:
        patched.await_load()


def _patch(
    module: nn.Module, recipe_class: type[PatchedAttention], terms: ScoreBiasModule, filled: bool
) -> PatchedAttention:
    place = device_of(module)
    if not any(t.is_meta for t in (*module.parameters(), *terms.parameters(), *terms.buffers())):
        terms.to(place)  # a plan may come from a model that is elsewhere
    _install(module, compose(recipe_class, type(module)), terms)
    assert isinstance(module, PatchedAttention)
    try:
        if terms.trained:
            module.resting = set_to_rest(module, module.sealed_sources())
        module.seal(prepare=filled)
    except BaseException:
        unpatch_module(module)
        raise
    return module


def unpatch_module(module: PatchedAttention) -> None:
    """Put the original class back and remove the terms.

    Raises:
        UsageError: its heads are split over processes.
    """
    if module.split_over > 1:
        raise UsageError(
            f"the heads of this module are split over {module.split_over} processes",
            "unpatch a model before shard_sites, or load it again",
        )
    wake(module, module.resting)
    del module._modules[SUBMODULE]
    for name in ("_seal", "_is_broken", "_child_names", "resting"):
        module.__dict__.pop(name, None)
    hooks = module._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook in (_seal_if_loaded, seal_if_loaded)]:
        del hooks[key]
    swap_class(module, module.original_class)


def refuse_trained(model: nn.Module) -> None:
    """Raise UsageError if a model has terms that are trained, and would lose them."""
    trained = [module for module in patched_modules(model) if module.trains_terms]
    if trained:
        raise UsageError(
            f"the terms of {len(trained)} modules are trained, and would be lost",
            "save_model keeps them; unpatch_model(model, discard_trained=True) drops them",
        )


def patch_owner(module: nn.Module, recipe_class: type[PatchedOwner]) -> None:
    """Give an owner its patched class, in place, after the attention modules below it.

    Args:
        module: an owner that is not patched.
        recipe_class: the class that its recipe supplies.

    Raises:
        UsageError: the owner cannot be patched, see `owner_refusal`.
    """
    reason = owner_refusal(module)
    if reason:
        raise UsageError(reason)
    consumers = tuple(patched_modules(module))
    _rename(module, {name: aside(name) for name in recipe_class.replaced})
    swap_class(module, compose(recipe_class, type(module)))
    assert isinstance(module, PatchedOwner)
    module._consumers, module._lean, module._seal = consumers, False, None
    names = (name for name, part in module.named_modules() if isinstance(part, PatchedAttention))
    module._consumer_names = " ".join(names)
    module.note_children()
    module.seal()


def unpatch_owner(module: PatchedOwner) -> None:
    """Put the original class back."""
    for name in ("_consumers", "_lean", "_seal"):
        del module.__dict__[name]
    for name in ("_consumer_names", "_child_names", "_found_stale"):
        module.__dict__.pop(name, None)
    names = {aside(name): name for name in module.replaced}
    swap_class(module, module.original_class)
    _rename(module, names)


def _rename(module: nn.Module, names: Mapping[str, str]) -> None:
    """Keep attributes under other names, those that the module has."""
    for old, new in names.items():
        if old in module.__dict__:
            module.__dict__[new] = module.__dict__.pop(old)


def _install(module: nn.Module, cls: type, terms: ScoreBiasModule) -> None:
    swap_class(module, cls)
    module.add_module(SUBMODULE, terms)
    module.note_children()  # type: ignore[operator]
    module.register_load_state_dict_post_hook(_seal_if_loaded)


def _seal_if_loaded(module: nn.Module, keys: object) -> None:
    """As `seal_if_loaded`, with weights that are kept elsewhere."""
    with at_hand([module]):
        seal_if_loaded(module, keys)


@dataclass(frozen=True, eq=False)
class _Patched:
    """What a patched module has that its original does not."""

    module: PatchedAttention
    cls: type
    terms: ScoreBiasModule
    seal: Seal
    resting: tuple[str, ...]

    @classmethod
    def of(cls, module: PatchedAttention) -> _Patched:
        return cls(module, type(module), module.score_bias, module._seal, module.resting)

    def restore(self) -> None:
        _install(self.module, self.cls, self.terms)
        self.module._seal = self.seal
        if self.resting:
            sources = [self.module.get_parameter(name) for name in self.resting]
            self.module.resting = set_to_rest(self.module, sources)


def unpatch_all(model: nn.Module) -> int:
    """Unpatch every patched module of a model and its owners.

    Returns:
        How many attention modules were patched.
    """
    for owner in patched_owners(model):
        unpatch_owner(owner)
    found = patched_modules(model)
    for module in found:
        unpatch_module(module)
    return len(found)


@contextmanager
def restored(model: nn.Module, *, always: bool) -> Iterator[None]:
    """On leaving, patched modules are again those of now, with the terms of now.

    Args:
        model: the model.
        always: after success, too; otherwise only after an exception.
    """
    before = [_Patched.of(module) for module in patched_modules(model)]
    owners = [(owner, owner.owner_class(), owner._seal) for owner in patched_owners(model)]
    done = False
    try:
        yield
        done = True
    finally:
        if always or not done:
            unpatch_all(model)
            for patched in before:
                patched.restore()
            for owner, recipe_class, seal in owners:
                patch_owner(owner, recipe_class)
                owner._seal = seal
