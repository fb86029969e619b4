"""Table "Experiment of SwinV2-B": 384 pixels, windows of 24 x 24, batch 64.

python scripts/paper/swinv2_b.py [--tiny] [--device cpu] [--rows FILE.csv ...]

Time and memory. The weights are random but for position biases and scales, which come from the
small trained model in `examples/`, so there is no accuracy; outputs are compared with the
original's in float32. The paper converts the last 8 layers; here all 24 are converted.
"""

from __future__ import annotations

from collections.abc import Sequence

from paper_tables import PaperTable, Published
from whole_models.case import Case
from whole_models.vision import cases


def _cases(tiny: bool) -> Sequence[Case]:
    return [cases(tiny)["swinv2-b"]]


TABLE = PaperTable(
    name="swinv2_b",
    title="SwinV2-B 384, batch 64",
    unit="s per call",
    per_ms=1e-3,
    cases=_cases,
    published={
        "none": Published("Pure FlashAttention", 0.180, None, 3957, "Acc@1 9.376 %"),
        "original": Published("Official Code", 0.473, 0.293, 12829, "Acc@1 87.144 %"),
        "sdpa": Published("FlashAttention with Bias", 0.230, 0.050, 11448, "Acc@1 87.142 %"),
        "flex": Published("FlexAttention", 2.885, 2.705, 25986, "Acc@1 87.142 %"),
        "ours": Published("FlashBias", 0.190, 0.010, 9429, "Acc@1 87.186 %"),
    },
    variants=(
        "none",
        "none-cudnn",
        "original",
        "sdpa",
        "sdpa-cudnn",
        "flex",
        "ours",
        "exact",
        "*-compiled",
    ),
)

if __name__ == "__main__":
    TABLE.main(__doc__)
