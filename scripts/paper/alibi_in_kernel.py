"""Table "Experiments on GPT-2 size model with ALiBi bias": the bias is made inside the kernel.

python scripts/paper/alibi_in_kernel.py [--tiny] [--device cpu] [--rows FILE.csv ...]

Inference, N = 2,048, batch 8 where it is measured here, 1 in the rows of `bench_models.py`, which
made the table in `scripts/results/paper/` (--rows). The peer is FlexAttention with ALiBi in its
score_mod, in the place of FlashAttention's ALiBi_slopes, which PyTorch does not come with; all are
compared with torch's attention without a bias, as in the paper.
"""

from __future__ import annotations

from gpt2_inference import gpt2_cases
from paper_tables import PaperTable, Published

TABLE = PaperTable(
    name="alibi_in_kernel",
    title="ALiBi in the kernel, GPT-2, inference",
    unit="s per 100 calls",
    per_ms=0.1,
    cases=gpt2_cases,
    published={
        "none": Published("FlashAttention w/o bias", 38.77),
        "flex-alibi": Published("FlashAttention with ALiBi_slopes", 38.98, 0.21),
        "exact": Published("FlashBias with decomposition in JIT", 38.98, 0.21),
    },
    variants=("none", "none-cudnn", "flex-alibi", "exact", "none-compiled", "none-cudnn-compiled",
              "flex-alibi-compiled", "exact-compiled"),
)  # fmt: skip

if __name__ == "__main__":
    TABLE.main(__doc__)
