"""Table "Experiment of GPT-2": 1.5 billion parameters, N = 2,048, the difference to no bias.

python scripts/paper/gpt2_inference.py [--tiny] [--device cpu] [--rows FILE.csv ...]

Inference. The paper does not say its batch. What is measured here has 8 sequences; the rows of
`bench_models.py`, which made the table in `scripts/results/paper/` (--rows), have 1.
FlexAttention with a bias is compared with FlexAttention without one, as there. Its bias is a matrix
for everybody but FlashBias; ALiBi in the score_mod of FlexAttention is in the table of
`alibi_in_kernel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paper_tables import PaperTable, Published
from whole_models.case import Case
from whole_models.language import gpt2, prefill

#: sequences per call, where something is measured here
BATCH = 8


def gpt2_cases(tiny: bool) -> Sequence[Case]:
    """The model at the paper's length."""
    if tiny:
        return [prefill("GPT-2 tiny", gpt2(2, 32, 4, 40), 2, 20)]
    return [prefill("GPT-2 1.5B", gpt2(), BATCH, 2048)]


TABLE = PaperTable(
    name="gpt2_inference",
    title="GPT-2 with ALiBi, inference",
    unit="s per 100 calls",
    per_ms=0.1,
    cases=gpt2_cases,
    published={
        "none": Published("Pure Causal FlashAttention", 38.77),
        "sdpa": Published("FlashAttention with Bias", 40.32, 1.55),
        "exact": Published("FlashBias", 39.26, 0.49),
        "none-flex": Published("Pure Causal FlexAttention", 38.76),
        "flex": Published("FlexAttention with Bias", 40.03, 1.27, note="FlashBias in it 39.78"),
    },
    variants=("none", "none-cudnn", "sdpa", "sdpa-cudnn", "exact", "none-flex", "flex",
              "original", "none-compiled",
              "none-cudnn-compiled", "sdpa-compiled", "sdpa-cudnn-compiled", "exact-compiled",
              "none-flex-compiled", "flex-compiled",
              "original-compiled"),
    bare={"flex": "none-flex"},
)  # fmt: skip

if __name__ == "__main__":
    TABLE.main(__doc__)
