"""Figures "Non-causal attention speed" and "Causal attention speed", inference.

python scripts/paper/attention_speed.py [--tiny] [--device cpu] [--rows FILE.csv ...]

Non-causal: 4 heads of 32, batch 2, a bias of rank 8. Causal: 50 heads of 32, batch 1, ALiBi. And
that of the main text: 8 heads of 16, rank 8. The figures have no numbers in print.
"""

from __future__ import annotations

from collections.abc import Sequence

from paper_tables import PaperTable, Published
from whole_models.case import Case
from whole_models.plain import alone, lengths

_FASTER = "over 2 times faster than the best other (non-causal), 1.75 times (causal)"


def _cases(tiny: bool) -> Sequence[Case]:
    found = []
    for n in lengths(tiny):
        found.append(alone(n, 2, 4, 32))
        found.append(alone(n, 1, 50, 32, causal=True))
        found.append(alone(n, 1, 8, 16))
    return found


TABLE = PaperTable(
    name="attention_speed",
    title="Attention alone, inference",
    unit="ms",
    per_ms=1.0,
    cases=_cases,
    published={"exact": Published("FlashBias", note=_FASTER)},
    variants=("original", "sdpa", "flex", "flex-alibi", "none", "exact"),
    by_length=True,
)

if __name__ == "__main__":
    TABLE.main(__doc__)
