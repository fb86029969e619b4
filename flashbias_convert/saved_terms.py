"""What state dicts hold beside tensors of terms: their layout, and what they were made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .seals import COLUMNS, Row
from .terms import ScoreBias


class SavedTerms(nn.Module):
    """Base of the module that holds a site's terms; it keeps them in step with state dicts.

    Its state-dict keys are ``layout``: text as bytes that says what the shapes do not (ranks,
    heads), so that no state dict is read as another's, and ``made_from``: hashes of what the terms
    were made from, see `seals`.

    Args:
        spec: of the terms, see `ScoreBias.spec`.
        device: where the terms are.
    """

    layout: Tensor
    made_from: Tensor
    #: whether the terms are, or were, parameters, and whether they are placeholders
    trained = False
    awaits_load = False

    # of the class, for pickles of earlier releases
    #: whether the last state dict had the terms, or what lacked of them, and whether some still
    #: lack; set here, cleared by the owner
    just_loaded = partly_loaded = False
    #: whether it came with them what they were made from
    rows_loaded = False
    #: names of terms, and of the owner's weights, that came with the last state dicts: those of a
    #: site that is split over shards
    _came: frozenset[str] = frozenset()
    _weights: frozenset[str] = frozenset()
    #: whether all terms came but what they were made from
    _lacks_rows = False

    def __init__(self, spec: Mapping[str, Any], device: torch.device) -> None:
        super().__init__()
        self._spec = dict(spec)
        self._rows: tuple[Row, ...] = ()
        text = ScoreBias.layout(self._spec).encode()
        codes = torch.tensor(list(text), dtype=torch.uint8, device=device)
        self.register_buffer("layout", codes)
        none = torch.zeros(0, COLUMNS, dtype=torch.int64, device=device)
        self.register_buffer("made_from", none)

    def _forget(self) -> None:
        """Drop everything that was derived from the tensors."""
        raise NotImplementedError

    def check_layout(self) -> None:
        """Compare the layout that came with the tensors; reads it from its device."""
        if torch.compiler.is_compiling() or self.layout.is_meta:
            return
        found, own = bytes(self.layout.tolist()), self._own_layout()
        if found != own:
            raise ValueError(
                "the loaded tensors belong to other terms than this module has: "
                f"{found.decode(errors='replace')} instead of {own.decode()}"
            )

    def is_empty(self, was_meta: bool) -> bool:
        """Whether a move has left memory that nothing was written to, as `to_empty` does.

        That is sure where it came from the meta device; elsewhere the layout tells, which is read
        from its device.

        Args:
            was_meta: the terms were on the meta device before it.
        """
        if self.layout.is_meta:
            return False
        found = bytes(self.layout.tolist())
        return was_meta or found != self._own_layout()

    def _own_layout(self) -> bytes:
        return ScoreBias.layout(self._spec).encode()

    def restore_layout(self) -> bool:
        """Whether the terms that were just loaded were saved as stale; takes that mark off.

        See `PatchedAttention.state_dict`. Reads the layout from its device.
        """
        if self.layout.is_meta or self.layout.any():
            return False
        text = ScoreBias.layout(self._spec).encode()
        self.layout.copy_(torch.tensor(list(text), dtype=torch.uint8))
        self._forget()
        return True

    def set_made_from(self, rows: Sequence[Row]) -> None:
        """Remember, for state dicts, what the terms were made from.

        Args:
            rows: one for each tensor, see `seals.rows_of`.
        """
        place = self.layout.device
        made = torch.tensor(rows, dtype=torch.int64, device=place).reshape(len(rows), COLUMNS)
        self.made_from = made
        self._rows, self.rows_loaded = tuple(rows), False

    def rows(self) -> tuple[Row, ...]:
        """What the terms were made from, as far as it is known.

        Of terms that were just loaded, it is read from its device.
        """
        if not self.rows_loaded:
            return self._rows
        return () if self.made_from.is_meta else tuple(map(tuple, self.made_from.tolist()))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str],
        *args: Any,
    ) -> None:  # fmt: skip
        key = f"{prefix}made_from"
        rows = state_dict.get(key)
        if isinstance(rows, Tensor) and rows.dim() == 2 and rows.shape[1] == COLUMNS:
            # as many as there are: another release may have made them from other tensors
            self.made_from = self.made_from.new_zeros(rows.shape)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)
        if any(other.startswith(prefix) for other in state_dict):
            self._forget()
            self._note(state_dict, prefix)
            if rows is None and key in missing:  # files of earlier releases
                missing.remove(key)

    def note_weights(self, names: Iterable[str]) -> None:
        """What weights of the owner are in a state dict; told before it is loaded.

        Weights that come again are those of another load, and end what came in part before.
        """
        found = frozenset(names)
        if found & self._weights:
            self.forget_loads()
        self._weights |= found

    def check_part(self) -> None:
        """Raise ValueError where the layout of terms that came in part is that of others."""
        if "layout" in self._came and not self.layout.is_meta and bool(self.layout.any()):
            self.check_layout()

    def forget_loads(self) -> None:
        """Nothing that came before has to do with what comes."""
        self._came, self._weights, self._lacks_rows = frozenset(), frozenset(), False

    def _note(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Whether all terms are there; what only some of them were made from vouches for none.

        A site may be split over the state dicts of shards, which come one after the other. Of
        terms that are trained some may come by themselves.
        """
        own = {name: _shape(held) for name, held in self.state_dict(keep_vars=True).items()}
        found = {name: _shape(state_dict.get(prefix + name)) for name in own}
        rows = found["made_from"] is not None
        came = {name for name, shape in found.items() if shape == own[name]} - {"made_from"}
        self._came |= came
        whole = own.keys() - {"made_from"} <= self._came
        alone = self.trained and not rows and not self.awaits_load
        if whole or alone or (rows and not came and self._lacks_rows):
            self.just_loaded, self.rows_loaded = True, rows or "made_from" in self._came
            if not alone or whole:
                self._came, self._lacks_rows = frozenset(), not self.rows_loaded
        else:
            self.partly_loaded = True
            self._came |= {"made_from"} if rows else set()


def _shape(held: Any) -> torch.Size | None:
    return getattr(held, "shape", None)
