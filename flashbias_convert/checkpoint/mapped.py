"""A model whose weights stay in their files: memory-mapped, and read where they are looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ..errors import UsageError
from ..recipe import Description, Recipe, Registry, Site
from .align import align, check_kinds, fill_tied
from .allocator import blocks_apart, give_back
from .architecture import Architecture, ArchLike
from .identify import identify
from .limits import build_from_file, check_size
from .open import compute_dtype
from .origin import note_of_unused
from .pickles import is_mappable
from .pieces import can_be_copied
from .read import Checkpoint
from .transformers_names import candidates
from .weights import equal_bits

#: blocks of this share of the largest shard are given back when they are freed; what is smaller
#: is faster without, and its holes do not matter
_SHARE = 100


class NotMappable(Exception):
    """This checkpoint can only be converted in memory; says why."""


@dataclass(frozen=True, eq=False)
class MappedModel:
    """A model with the weights of shards, of which none was read.

    Attributes:
        model: in evaluation mode. Its weights are memory-mapped and have the dtypes of the files.
        architecture: what it was built from.
        checkpoint: what was read; its notes name tensors that the model has no name for.
        sources: key of the model -> key in the checkpoint, for what the files hold.
        tied: key of the model -> the key of `sources` that it is tied to.
        unused: keys in the checkpoint that the model has no name for.
        recipes: of its sites; while one describes a site, what that bias is made from has the
            dtype to compute in. Modules bring them along, for those who look at the model later.
        computes: the dtype to compute in.
    """

    model: nn.Module
    architecture: Architecture
    checkpoint: Checkpoint
    sources: dict[str, str]
    tied: dict[str, str]
    unused: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    computes: torch.dtype


def open_mapped(
    checkpoint: Checkpoint,
    *,
    arch: ArchLike | None = None,
    arch_args: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    recipes: Iterable[Recipe] = (),
) -> MappedModel:
    """Build the model of shards without reading their weights.

    Args:
        checkpoint: what was read; its tensors are the weights of an original model.
        arch, arch_args: see `open_model`.
        dtype: of what biases are made from; default as `open_model`.
        recipes: recipes beside the installed ones; they say what biases are made from.

    Raises:
        NotMappable: the weights cannot be mapped, or are other tensors in the model.
        CheckpointError: shapes that do not fit.
        UnknownArchitectureError: the architecture is unknown or ambiguous.
    """
    _require_mappable(checkpoint)
    architecture = identify(checkpoint, arch, arch_args)
    check_size(architecture, checkpoint)
    try:
        with _without_memory():
            model = build_from_file(architecture, checkpoint)
    except UsageError as error:  # it computes with its parameters while it is built
        raise NotMappable("its model cannot be built without memory for its weights") from error
    _share_buffers(model)
    found = _by_model_names(checkpoint, model, architecture)
    computes = dtype or compute_dtype(checkpoint.tensors)
    if computes != torch.float32:
        for buffer in model.buffers():
            buffer.data = buffer.to(computes) if buffer.is_floating_point() else buffer
    _assign(model, found)
    registry = Registry(tuple(recipes))
    wide = _bring_recipes(model, registry, computes)
    sources, tied = _split_tied(checkpoint, found)
    unused = _unused_keys(checkpoint, sources)
    notes = note_of_unused([checkpoint.names[key] for key in unused])
    checkpoint = replace(checkpoint, notes=(*checkpoint.notes, *notes))
    return MappedModel(
        model.eval(), architecture, checkpoint, sources, tied, unused, wide, computes
    )


def sparing(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """Inside, what is freed is not kept, so that the memory in use is that of what is needed."""
    return blocks_apart(max(file.stat().st_size for file in checkpoint.files) // _SHARE)


def _require_mappable(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        with file.open("rb") as opened:
            is_safetensors = opened.read(9)[8:9] == b"{"
        if not is_safetensors and not is_mappable(file):
            raise NotMappable(f"{file.name} has a format of torch that cannot be memory-mapped")
    if not all(map(can_be_copied, checkpoint.tensors.values())):
        raise NotMappable("it holds tensors that are not plain")


@contextmanager
def _without_memory() -> Iterator[None]:
    """Inside, parameters of modules have a shape and a device, but share one value.

    On the meta device they would take buffers there with them, which no file holds.
    """
    thread = threading.get_ident()

    def shared(_: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or _is_shared(parameter):
            return None
        one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        return nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)

    register: Any = register_module_parameter_registration_hook  # may return a parameter
    hook = register(shared)
    try:
        with _NoInit():
            yield
    finally:
        hook.remove()


class _NoInit(TorchFunctionMode):
    """Skips what would write into parameters without memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        target = args[0] if args else (kwargs or {}).get("tensor")
        if writes and isinstance(target, Tensor) and _is_shared(target):
            return target
        return func(*args, **(kwargs or {}))


def _share_buffers(model: nn.Module) -> None:
    """Keep one of equal buffers that no file holds, such as the index of every window."""
    known: dict[tuple[Any, ...], list[Tensor]] = {}
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is None or buffer.is_meta or buffer.layout != torch.strided:
                continue
            alike = known.setdefault((buffer.dtype, buffer.shape, buffer.stride()), [])
            same = next((other for other in alike if equal_bits(other, buffer)), None)
            if same is None:
                alike.append(buffer)
            module._buffers[name] = buffer if same is None else same
    give_back()


def _is_shared(tensor: Tensor) -> bool:
    """Whether the entries of a tensor lie in one place."""
    if tensor.layout != torch.strided or tensor.numel() < 2:
        return False
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


# -- names ---------------------------------------------------------------------------------


def _by_model_names(
    checkpoint: Checkpoint, model: nn.Module, arch: Architecture
) -> dict[str, Tensor]:
    """The tensors of the files under the keys of the model's state, tied ones twice."""
    if arch.library != "transformers":
        return align(checkpoint.tensors, model)
    target = model.state_dict(keep_vars=True)
    for names in candidates(checkpoint.tensors, model):
        known = {n: checkpoint.tensors[key] for n, key in names.items() if n in target}
        found = fill_tied(known, target)
        if found.keys() == target.keys():
            check_kinds(found, target)
            return {key: found[key] for key in target}
    raise NotMappable("in the model that transformers makes of them its weights are other tensors")


def _split_tied(
    checkpoint: Checkpoint, found: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, str]]:
    """Keys of the model -> keys of the files; and -> other keys of the model, where tied."""
    keys_of: dict[int, list[str]] = {}
    for key, tensor in checkpoint.tensors.items():  # a pickle can hold one under several names
        keys_of.setdefault(id(tensor), []).append(key)
    sources: dict[str, str] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in sorted(found.items(), key=lambda item: item[0] not in checkpoint.tensors):
        if id(tensor) not in keys_of:
            raise NotMappable(f"{name} is not a tensor of its files")
        left = keys_of[id(tensor)]
        if left:
            key = name if name in left else left[0]
            left.remove(key)
            sources[name] = key
            first.setdefault(id(tensor), name)
        else:
            tied[name] = first[id(tensor)]
    return {name: sources[name] for name in found if name in sources}, tied


def _unused_keys(checkpoint: Checkpoint, sources: Mapping[str, str]) -> tuple[str, ...]:
    """Keys of the files that the model has no name for."""
    kept = set(sources.values())
    return tuple(key for key in checkpoint.tensors if key not in kept)


# -- weights -------------------------------------------------------------------------------


def _assign(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Put the tensors of the files into the model, as they are."""
    made: dict[int, nn.Parameter] = {}
    for name, tensor in found.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        old = module._parameters.get(leaf)
        if old is None:
            module._buffers[leaf] = tensor
        elif id(old) not in made:
            made[id(old)] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    for module in model.modules():
        for leaf, old in module._parameters.items():
            if old is not None:
                module._parameters[leaf] = made[id(old)]


def _bring_recipes(model: nn.Module, registry: Registry, dtype: torch.dtype) -> tuple[Recipe, ...]:
    """Give every site its recipe, which describes it in the dtype to compute in; all of them."""
    own = frozenset(id(tensor) for tensor in [*model.parameters(), *model.buffers()])
    found = [(module, registry.find(module)) for module in model.modules()]
    wide = {
        recipe: _Brought.of(recipe, _Describe(recipe, dtype, own))
        for recipe in dict.fromkeys(recipe for _, recipe in found)
        if recipe is not None
    }
    for module, recipe in found:
        if recipe is not None:
            module.flashbias_recipe = wide[recipe]  # type: ignore[assignment]
    return tuple(wide.values())


class _Brought(Recipe):
    """A recipe on a module of one process: recipes cannot be pickled, and models should be."""

    @classmethod
    def of(cls, recipe: Recipe, describe: Callable[[Site], Description]) -> _Brought:
        own = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
        return cls(**{**own, "describe": describe})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy finds the installed recipe


@dataclass(frozen=True)
class _Describe:
    """Describes a site while what its bias is made from has the dtype to compute in.

    Attributes:
        recipe: of the site.
        dtype: to compute in.
        own: identities of the tensors of the model.
    """

    recipe: Recipe
    dtype: torch.dtype
    own: frozenset[int]

    def __call__(self, site: Site) -> Description:
        with _widened(_bias_sources(self.recipe, site.module, self.own), self.dtype):
            return _in_dtype(self.recipe.describe(site), self.dtype)


@contextmanager
def _widened(sources: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors have the dtype to compute in, which reads them; then they are as before."""
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor in sources:
            if tensor.is_floating_point() and tensor.dtype != dtype:
                before.append((tensor, tensor.data))
                tensor.data = tensor.detach().to(dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _bias_sources(recipe: Recipe, module: nn.Module, own: frozenset[int]) -> list[Tensor]:
    """What the bias of a site is made from; all that the site has, where its recipe cannot say."""
    everything = [*module.parameters(), *module.buffers()]
    try:
        found = recipe.attention.bias_sources(module)  # type: ignore[arg-type]
    except (AttributeError, TypeError):  # it needs the terms, which are not there yet
        return everything
    tensors = [source for source in found if isinstance(source, Tensor)]
    return tensors if all(id(tensor) in own for tensor in tensors) else everything


def _in_dtype(found: Description, dtype: torch.dtype) -> Description:
    """The same, for tables that modules share: nobody says that a bias is made from them.

    Its tensors are none of the model's, which do not stay in this dtype.
    """
    bias = found.bias
    if bias is not None:
        bias = bias.detach().to(torch.promote_types(bias.dtype, dtype))
    terms = tuple(
        term.map_tensors(lambda _, tensor: tensor.detach()).to(dtype=dtype)
        for term in found.exact_terms
    )
    return replace(found, bias=bias, exact_terms=terms)
