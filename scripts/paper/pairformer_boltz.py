"""The same block as Boltz's own classes, where they can be imported, with the same weights."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable

import numpy
import torch
from pairformer_block import AttentionPairBias, Pairformer
from torch import Tensor, nn

#: names in Boltz's layer, and where their weights are in ours: parameter, part of it, of how many
_TRIANGLE = {
    "layer_norm": ("norm", 0, 1), "linear": ("pair_bias", 0, 1), "mha.linear_q": ("qkv", 0, 3),
    "mha.linear_k": ("qkv", 1, 3), "mha.linear_v": ("qkv", 2, 3), "mha.linear_g": ("gate", 0, 1),
    "mha.linear_o": ("out", 0, 1),
}  # fmt: skip
_MULTIPLICATION = {
    "norm_in": ("norm", 0, 1), "p_in": ("into", 0, 1), "g_in": ("gates", 0, 1),
    "norm_out": ("norm_out", 0, 1), "p_out": ("out", 0, 1), "g_out": ("gate", 0, 1),
}  # fmt: skip
_TRANSITION = {
    "norm": ("norm", 0, 1), "fc1": ("wide", 0, 2), "fc2": ("wide", 1, 2), "fc3": ("out", 0, 1)
}  # fmt: skip
_ATTENTION = {
    "proj_q": ("query", 0, 1), "proj_k": ("kv", 0, 2), "proj_v": ("kv", 1, 2),
    "proj_g": ("gate", 0, 1), "proj_z.0": ("norm_z", 0, 1), "proj_z.1": ("pair_bias", 0, 1),
    "proj_o": ("out", 0, 1),
}  # fmt: skip
_PARTS = {
    "tri_mul_out": ("outgoing", _MULTIPLICATION), "tri_mul_in": ("incoming", _MULTIPLICATION),
    "tri_att_start": ("starting", _TRIANGLE), "tri_att_end": ("ending", _TRIANGLE),
    "transition_z": ("pair_transition", _TRANSITION), "attention": ("attention", _ATTENTION),
    "transition_s": ("single_transition", _TRANSITION),
}  # fmt: skip


def importable() -> bool:
    """Whether Boltz's layers are there, and what they need."""
    if importlib.util.find_spec("boltz") is None:
        return False
    lacking = False
    try:
        import scipy.stats  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        lacking = True
        _draw_without_scipy()
    try:
        import boltz.model.layers.pairformer  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as missing:
        print(f"without boltz: {missing}", flush=True)
        return False
    finally:
        for name in ("scipy", "scipy.stats") if lacking else ():
            del sys.modules[name]
    return True


def _draw_without_scipy() -> None:
    """Boltz draws its weights with scipy's `truncnorm`; here ours take their place anyway."""
    drawn = types.SimpleNamespace(std=lambda *_, **__: 1.0,
                                  rvs=lambda *_, size, **__: numpy.zeros(size))  # fmt: skip
    scipy, stats = types.ModuleType("scipy"), types.ModuleType("scipy.stats")
    scipy.stats, stats.truncnorm = stats, drawn  # type: ignore[attr-defined]
    sys.modules |= {"scipy": scipy, "scipy.stats": stats}


@torch.no_grad()
def _copy(mine: nn.Module, theirs: nn.Module, names: dict[str, tuple[str, int, int]]) -> None:
    for name, (own, at, of) in names.items():
        target, source = theirs.get_submodule(name), mine.get_submodule(own)
        for kind, parameter in target.named_parameters():
            parameter.copy_(source.get_parameter(kind).chunk(of)[at])


class BoltzBlock(nn.Module):
    """Boltz's layer of the weights of ours, as its users run it: fp32 weights under autocast.

    Args:
        block: ours.
        dtype: of products; no autocast for fp32 and fp64.
    """

    def __init__(self, block: Pairformer, dtype: torch.dtype) -> None:
        from boltz.data.const import chunk_size_threshold
        from boltz.model.layers.pairformer import PairformerLayer

        super().__init__()
        pair, heads, single, single_heads = block.sizes
        self.layer = PairformerLayer(
            single, pair, single_heads, 0.0, pair // heads, heads, v2=True
        ).to(next(block.parameters()).device)
        for theirs, (ours, names) in _PARTS.items():
            _copy(block.get_submodule(ours), self.layer.get_submodule(theirs), names)
        _copy(block.attention, self.layer, {"pre_norm_s": ("norm", 0, 1)})
        self.dtype, self._threshold = dtype, chunk_size_threshold

    def _chunk(self, n: int) -> int | None:
        """Rows that triangle attention takes at a time, as in Boltz's `PairformerModule`."""
        if torch.is_grad_enabled():
            return None
        return 128 if n > self._threshold else 512

    def _autocast(self, device: torch.device) -> torch.autocast:
        half = self.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(device.type, self.dtype if half else None, enabled=half)

    def part(self, name: str, s: Tensor, z: Tensor, kernels: bool = False) -> Tensor:
        """What a part adds to its residual; `name` as in our block."""
        theirs = next(key for key, (ours, _) in _PARTS.items() if ours == name)
        module = self.layer.get_submodule(theirs)
        s, z = s.float(), z.float()[None]
        with self._autocast(z.device):
            if name == "single_transition":
                return module(s)
            if name == "attention":
                with torch.autocast(z.device.type, enabled=False):  # as in its layer
                    x = self.layer.pre_norm_s(s)
                    return module(s=x, z=z, mask=s.new_ones(s.shape[:2]), k_in=x)
            if name == "pair_transition":
                return module(z)[0]
            ones = z.new_ones(z.shape[:3])
            if name in ("outgoing", "incoming"):
                return module(z, mask=ones, use_kernels=kernels)[0]
            chunk = self._chunk(z.shape[1])
            return module(z, mask=ones, chunk_size=chunk, use_kernels=kernels)[0]

    def forward(self, s: Tensor, z: Tensor, kernels: bool = False) -> tuple[Tensor, Tensor]:
        s, z = s.float(), z.float()[None]
        ones, pairs, chunk = (
            s.new_ones(s.shape[:2]),
            z.new_ones(z.shape[:3]),
            self._chunk(len(z[0])),
        )
        with self._autocast(z.device):
            s, z = self.layer(s, z, ones, pairs, chunk, use_kernels=kernels)
        return s, z[0]


def diffusion_step(
    module: AttentionPairBias, dtype: torch.dtype, keeps: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Boltz-1's attention with pair bias: (samples, N, C), (N, N, C') -> (samples, N, C).

    Args:
        module: ours, whose weights it gets.
        dtype: of products.
        keeps: the projected bias stays from step to step, as Boltz has it.
    """
    from boltz.model.layers.attention import AttentionPairBias as Theirs

    single, channels = module.query.in_features, module.pair_bias.in_features
    theirs = Theirs(single, channels, module.heads).to(module.query.weight.device)
    _copy(module, theirs, {**_ATTENTION, "norm_s": ("norm", 0, 1)})
    half, cache = dtype in (torch.bfloat16, torch.float16), {}

    def step(s: Tensor, z: Tensor) -> Tensor:
        with torch.autocast(s.device.type, dtype if half else None, enabled=half):
            mask = s.new_ones(s.shape[:2])
            return theirs(s.float(), z.float()[None], mask, len(s), None, cache if keeps else None)

    return step
