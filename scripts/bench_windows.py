"""Time one SwinV2 window attention module, original and converted, by window size.

python scripts/bench_windows.py [--output FILE.csv]

Shows from which window size on a conversion pays: the rule SHORTEST_N in decompose/costs.py.
Times are on the card (CUDA graph replays), bf16, batch such that there are 2**19 tokens.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from timm.models.swin_transformer_v2 import WindowAttention

from flashbias_convert import patch_model

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 2**19


def time_ms(module: torch.nn.Module, x: torch.Tensor) -> float:
    """Median milliseconds of a forward pass."""
    import triton

    torch.cuda.synchronize()  # the other stream must not overtake what made the inputs
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        return float(
            triton.testing.do_bench_cudagraph(lambda: module(x), rep=20, return_mode="median")
        )


def main() -> None:
    """Print and write a row per window size and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_windows.csv")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["window", "n", "method", "ms", "original_ms", "ratio", "card"])
        for window in (2, 4, 6, 7, 8, 12, 16, 24):
            torch.manual_seed(0)
            module = WindowAttention(128, (window, window), 4).cuda().bfloat16().eval()
            x = torch.randn(TOKENS // window**2, window**2, 128, device="cuda").bfloat16()
            original = time_ms(module, x)
            for method, cap in (("exact", None), ("svd", 16)):
                patch_model(
                    module, method=method, max_rank=cap, energy=0.5, max_attention_error=1.0
                )
                ms = time_ms(module, x)
                row = [window, window**2, method, f"{ms:.4f}", f"{original:.4f}",
                       f"{original / ms:.2f}", torch.cuda.get_device_name()]  # fmt: skip
                writer.writerow(row)
                print(*row, flush=True)


if __name__ == "__main__":
    main()
