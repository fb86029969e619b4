"""What to say of a model in which no module has a recipe."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torch import nn

from .errors import NothingToConvertError
from .recipe import Registry, class_of, qualified_name
from .selection import listed


def nothing_found(model: nn.Module, registry: Registry) -> NothingToConvertError:
    """The error, with the classes that have a recipe, those of the model, and where to look."""
    known = list(dict.fromkeys(map(class_of, registry.class_names())))
    present: dict[str, str] = {}  # class name -> name of the first module of that class
    for name, module in model.named_modules():
        present.setdefault(qualified_name(type(module)), name)
    short = {cls.rpartition(".")[2]: cls for cls in present}
    # torch's own have no recipe, whatever has one that goes by the same name
    own = [name for name, cls in short.items() if not cls.startswith("torch.nn.")]
    near = {c for k in known for c in difflib.get_close_matches(k.rpartition(".")[2], own)}
    similar = [short[c] for c in short if c in near]
    attention = [cls for c, cls in short.items() if re.search("attention|attn", c, re.IGNORECASE)]
    alike = sorted(known, key=lambda k: -_likeness(k.rpartition(".")[2], own))
    hints = [
        f"`flashbias-convert recipes` lists the {len(registry.labels())} that are known; "
        f"classes that have one, most alike first: {listed(alike, 3)}"
    ]
    if similar:
        hints.append(f"nearest classes in this model: {listed(similar)}")
    if attention:
        places = [f"{cls} (first at {present[cls]!r})" for cls in attention]
        hints.append(f"looks like attention: {listed(places)}")
        hints.append("`flashbias-convert probe` tells whether a bias is added there")
    return NothingToConvertError("no module of this model has a recipe", "; ".join(hints))


def _likeness(name: str, names: Iterable[str]) -> float:
    """How alike a name is to the one that is most like it, from 0 to 1."""
    return max((difflib.SequenceMatcher(None, name, n).ratio() for n in names), default=0.0)
