"""Does torch's compiler get MONAI's SwinUNETR right on this machine, converted or not?

python scripts/check_compiled_unetr.py [--tiny] [--device cpu]

Compiled outputs beside those of eager mode, with strides padded as torch does it by default on
GPUs, and as they are (`flashbias_convert.compiler_faults`): of a map that is normed, padded and cut
into windows as SwinUNETR does it, by torch alone; of the encoder; and of the converted encoder, the
last two where MONAI is installed. In bfloat16 on a GPU, where rounding is about 0.004 of outputs of
size 1. Prints a line each; exit code 1 if one with padded strides is off by more than 0.02.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from whole_models.measuring import strides

from flashbias_convert import patch_model

#: root mean square, of outputs of size 1
MOST = 0.02
WINDOW = 7


class Windows(nn.Module):
    """A map (B, C, side, side, side) normed along its channels, padded, and cut into windows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        rest = -x.shape[-1] % WINDOW
        x = F.pad(self.norm(x.permute(0, 2, 3, 4, 1)), (0, 0, *(0, rest) * 3))
        for dim in (3, 2, 1):  # each into windows, and places in them
            x = x.unflatten(dim, (-1, WINDOW))
        return x.permute(0, 1, 3, 5, 2, 4, 6, 7).contiguous().view(-1, WINDOW**3, x.shape[-1])


class Encoder(nn.Module):
    """That of SwinUNETR, whose maps of all stages are put in one row."""

    def __init__(self, features: int, *, converted: bool) -> None:
        super().__init__()
        from monai.networks.nets.swin_unetr import SwinUNETR

        unetr: Any = SwinUNETR(in_channels=1, out_channels=2, feature_size=features).eval()
        if converted:
            patch_model(unetr, force_all=True)
        self.encoder = unetr.swinViT

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in self.encoder(x, True)])


def cases(tiny: bool) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """A name, a module, and the shape of what goes through it."""
    batch, features, side = (1, 12, 32) if tiny else (4, 48, 96)
    yield "a map in windows", Windows(features), (batch, features, *(side // 2,) * 3)
    if importlib.util.find_spec("monai") is not None:
        for name in ("encoder", "converted encoder"):
            module = Encoder(features, converted=name != "encoder")
            yield name, module, (batch, 1, side, side, side)


@torch.no_grad()
def off_by(module: nn.Module, x: Tensor, *, padded: bool) -> float:
    """Root mean square of what a second compiled call differs by from eager mode."""
    torch.compiler.reset()
    expected = module(x).float()
    with strides(padded):
        compiled = torch.compile(module, dynamic=False)
        compiled(x)
        found = compiled(x).float()
    return float((found - expected).square().mean().sqrt())


def main() -> int:
    """Print what every case is off by."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    wrong = 0
    for name, module, shape in cases(options.tiny):
        torch.manual_seed(0)
        x = torch.randn(shape, dtype=dtype, device=options.device)
        module = module.eval().to(options.device, dtype)
        for padded in (True, False):
            off = off_by(module, x, padded=padded)
            wrong += padded and off > MOST
            print(
                f"{name:20s} strides {'padded' if padded else 'as they are':12s} off by {off:.5f}"
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
