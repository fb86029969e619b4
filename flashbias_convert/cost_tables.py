"""Tables of what attention costs per score, as scripts measure them on a card."""

from __future__ import annotations

import csv

#: length -> picoseconds per score, ascending
Curve = list[tuple[int, float]]
#: what the columns of a table are called
FIELDS = ("head_size", "n", "form", "ms", "ps_per_score", "class", "card", "torch", "triton")
#: Classes of cards by compute capability: what was measured on one card counts for its class.
CLASSES = {
    (8, 0): "ampere", (8, 6): "ampere", (8, 9): "ada", (9, 0): "hopper", (10, 0): "blackwell",
    (10, 3): "blackwell", (12, 0): "blackwell",
}  # fmt: skip


def read_costs(text: str, card_class: str) -> dict[int, dict[str, Curve]]:
    """The rows of one class of cards: head size -> form -> curve.

    Args:
        text: CSV with (at least) the columns `FIELDS` up to "class".
        card_class: see `CLASSES`.

    Raises:
        KeyError, ValueError: no such table.
    """
    found: dict[int, dict[str, Curve]] = {}
    for row in csv.DictReader(text.splitlines()):
        if row["class"] != card_class:
            continue
        forms = found.setdefault(int(row["head_size"]), {})
        forms.setdefault(row["form"], []).append((int(row["n"]), float(row["ps_per_score"])))
    for forms in found.values():
        for curve in forms.values():
            curve.sort()
    return found
