"""A model that holds nothing but the tensors of biases, to be inspected like any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError
from ..patched_attention import PatchedAttention
from ..recipe import Description, Recipe, Site
from .kinds import KINDS, Kind
from .sizes import Sizes


class BareAttention(nn.Module):
    """Where a bias was found; it computes nothing else.

    Args:
        kind: of the bias.
        tensors: of the site, by their names in it, as they are in the file; not read here.
        sizes: what they do not say.
        name: of the site in the file.
        head_dim: D; 0 where nothing shows it.
    """

    def __init__(
        self, kind: Kind, tensors: Mapping[str, Tensor], sizes: Sizes, name: str, head_dim: int
    ) -> None:
        super().__init__()
        self.kind, self.sizes, self.site, self.head_dim = kind, sizes, name, head_dim
        self.keys = {key.replace(".", "_"): key for key in tensors}
        for own, key in self.keys.items():
            self.register_buffer(own, tensors[key])

    @property
    def flashbias_recipe(self) -> Recipe:
        """See `Registry.find`."""
        return RECIPE

    def describe(self, tokens: int | None) -> Description:
        """The bias, from the tensors alone."""
        tensors = {key: self.get_buffer(own) for own, key in self.keys.items()}
        sizes = replace(self.sizes, tokens=tokens)
        found = self.kind.describe(tensors, sizes, self.site)
        return replace(found, head_dim=self.head_dim)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("there are only the tensors of a bias here, and no attention")


def bare_model(tensors: Mapping[str, Tensor], sizes: Sizes) -> nn.Module | None:
    """A module tree with a `BareAttention` wherever names and shapes show a bias.

    Args:
        tensors: a state dict; only what biases are made from is read, when it is looked at.
        sizes: what tensors do not say.

    Returns:
        None where no bias was found.
    """
    found: dict[str, Kind] = {}
    for kind in KINDS:
        for key in tensors:
            if key == kind.shows or key.endswith(f".{kind.shows}"):
                found.setdefault(key[: -len(kind.shows)].rstrip("."), kind)
    if not found:
        return None
    order = sorted(found, key=_place)
    root = _attention("", found, tensors, sizes) if "" in found else nn.Module()
    for name in order:
        if name:
            path, _, leaf = name.rpartition(".")
            _branch(root, path).add_module(leaf, _attention(name, found, tensors, sizes))
    return root.eval()


def _place(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sites are told in the order of their numbers: blocks.2 before blocks.10."""
    parts = name.split(".")
    return tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts)


def _branch(root: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else ():
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root._modules[name]  # type: ignore[assignment]
    return root


def _attention(
    name: str, found: Mapping[str, Kind], tensors: Mapping[str, Tensor], sizes: Sizes
) -> BareAttention:
    kind, prefix = found[name], f"{name}." if name else ""
    own = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    kept = {k: t for k, t in own.items() if k == kind.shows or k.startswith(kind.also or ("\0",))}
    return BareAttention(kind, kept, sizes, name, _head_dim(own, kind))


def _head_dim(own: Mapping[str, Tensor], kind: Kind) -> int:
    """D, from the shape of a projection beside the bias."""
    heads = _heads(own, kind)
    for name, parts in _PROJECTIONS:
        if name in own and own[name].dim() == 2 and heads:
            return int(own[name].shape[0]) // parts // heads
    return 0


#: weights (parts * H * D, C), and their parts
_PROJECTIONS = (("qkv.weight", 3), ("linear1.weight", 3), ("query.weight", 1), ("q.weight", 1))


def _heads(own: Mapping[str, Tensor], kind: Kind) -> int:
    shape = own[kind.shows].shape
    if kind.shows == "earth_specific_bias":
        return int(shape[2]) if len(shape) == 5 else 0
    last = own.get(kind.shows.replace(".0.weight", ".2.weight"))
    if kind.name == "layers":
        return int(last.shape[0]) if last is not None and last.dim() else 0
    return int(shape[-1]) if len(shape) else 0


def _describe(site: Site) -> Description:
    assert isinstance(site.module, BareAttention)
    return site.module.describe(site.tokens)


RECIPE = Recipe(
    name="bare",
    title="Biases of tensors alone",
    classes=(f"{BareAttention.__module__}.{BareAttention.__qualname__}",),
    library="flashbias-convert",
    tested=">=0.1,<1",
    attention=PatchedAttention,
    describe=_describe,
)
