"""What changes at a site whose terms are trained: their dtype, sources that rest, and dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .terms import ScoreBias, Term

#: attributes in which attention modules keep a probability of dropout of their weights
_PROBABILITIES = ("attention_dropout", "attn_dropout", "attn_dropout_p", "dropout_p")


def dropout_problem(module: nn.Module, bypassed: Iterable[str]) -> str | None:
    """Why terms cannot be trained with the dropout that a module asks for, or None if they can.

    Dropout of attention weights is the one thing of a training step that the fused path leaves
    out.

    Args:
        module: an attention module.
        bypassed: names of its children that the fused path does not call.
    """
    for name, probability in _dropouts(module, bypassed):
        if probability > 0:
            return (
                f"it drops attention weights in training ({name} is {probability:g}), which the "
                "fused path does not do: set that to 0 to train the terms"
            )
    return None


def _dropouts(module: nn.Module, bypassed: Iterable[str]) -> Iterator[tuple[str, float]]:
    yield from _own_probabilities(module, "")
    for name in bypassed:
        child = module._modules.get(name)
        for below, part in () if child is None else child.named_modules(prefix=name):
            if isinstance(part, nn.Dropout):
                yield f"{below}.p", part.p
            yield from _own_probabilities(part, f"{below}.")


def _own_probabilities(module: Any, prefix: str) -> Iterator[tuple[str, float]]:
    for name in _PROBABILITIES:
        value = getattr(module, name, None)
        if isinstance(value, float):
            yield prefix + name, value


def set_to_rest(module: nn.Module, sources: Iterable[Any]) -> tuple[str, ...]:
    """Ask for no gradients of the parameters of a module that `sources` names.

    They are no longer part of what it computes: an optimizer would meet them without gradients,
    and DistributedDataParallel would wait for these.

    Returns:
        The names of those that asked for gradients before.
    """
    resting = {id(source) for source in sources}
    names = []
    for name, parameter in module.named_parameters():
        if id(parameter) in resting and parameter.requires_grad:
            parameter.requires_grad_(False)
            names.append(name)
    return tuple(names)


def wake(module: nn.Module, names: Iterable[str]) -> None:
    """Undo `set_to_rest`."""
    for name in names:
        module.get_parameter(name).requires_grad_(True)


def can_learn(term: Term) -> bool:
    """Whether a term has a tensor that can be trained: one of floating point."""
    return any(tensor.is_floating_point() for tensor in term.tensors().values())


def in_full_precision(bias: ScoreBias) -> ScoreBias:
    """A copy whose floating-point tensors are fp32 or wider."""

    def widened(_: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

    return ScoreBias(tuple(term.map_tensors(widened) for term in bias.terms), bias.num_heads)
