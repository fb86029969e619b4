"""Models of libraries that are no dependencies, where they are installed.

None of them is asked what it needs before its row is measured: a row says what was missing. The
compiler of torch 2.14 fails on the triangle attention of Boltz and Protenix, of five dimensions,
where its patterns of attention expect four: measure their "original" in eager mode, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .given import normal
from .parts import Parts, Sizes

#: where each library has its triangle attention, and how its recipe is called
_TRIANGLES = {
    "boltz_triangle": "boltz.model.layers.triangular_attention.attention",
    "openfold_triangle": "openfold.model.triangular_attention",
    "openfold3_triangle": "openfold3.core.model.layers.triangular_attention",
    "protenix_triangle": "protenix.model.triangular.triangular",
}
#: a library that each recipe needs, beside those
_LIBRARIES = {
    "boltz_pair_bias": "boltz", "openfold3_pair_bias": "openfold3", "monai_swin_unetr": "monai",
    "protenix_pair_bias": "protenix", "physicsnemo_pangu": "physicsnemo",
    "openfold_msa": "openfold",
    **{name: path.partition(".")[0] for name, path in _TRIANGLES.items()},
}  # fmt: skip

#: of models that torch's compiler gets wrong where it pads strides, see `Case.pads_strides`
STRIDES_AS_THEY_ARE = frozenset({"monai_swin_unetr"})


def parts(s: Sizes) -> Parts:
    """By the names of their rows; those of libraries that are not there are left out."""
    made = {**_triangles(s), **_alignments(s), **_pair_biases(s), **_windows(s)}
    return {name: part for name, part in made.items() if available(name.partition(",")[0])}


def available(recipe: str) -> bool:
    """Whether the library of a recipe is installed; nothing is imported."""
    return importlib.util.find_spec(_LIBRARIES[recipe]) is not None


def recipes() -> set[str]:
    """Names of the recipes whose libraries are no dependencies."""
    return set(_LIBRARIES)


class Triangles(nn.Module):
    """Triangle attention of the starting and of the ending node, each added to the pairs."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, z: Tensor) -> Tensor:
        mask = z.new_ones(z.shape[:3])
        for module in self.inner:
            z = z + module(z, mask=mask)
        return z


class Rows(nn.Module):
    """Row attention of alignments (B, S, N, C) with pairs (B, N, N, C'), some layers of it."""

    def __init__(self, inner: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        mask = m.new_ones(m.shape[:3])
        for module in self.inner:
            m = m + module(m, z=z, mask=mask)
        return m


class PairBiased(nn.Module):
    """Attention with pair bias, some layers of it.

    Args:
        inner: the layers.
        call: called with a layer, tokens, pairs and a mask of ones.
    """

    def __init__(self, inner: list[nn.Module], call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.call = nn.ModuleList(inner), call

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        mask = x.new_ones(x.shape[:2])
        for module in self.inner:
            x = x + self.call(module, x, z, mask)
        return x


def _drawn(model: nn.Module) -> nn.Module:
    """Weights of linear layers that keep the size of what goes through: some begin as zeros."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model


def _imported(path: str) -> Any:
    os.environ.setdefault("LAYERNORM_TYPE", "torch")  # else Protenix compiles a kernel for norms
    return importlib.import_module(path)


def _found(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False


def _triangles(s: Sizes) -> Parts:
    pair, head, n = (16, 8, 12) if s.tiny else (128, 32, 256)

    def maker(path: str) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            cls = _imported(path).TriangleAttention
            both = (cls(pair, head, pair // head, starting=starting) for starting in (True, False))
            return _drawn(Triangles(*both))

        return make

    return {
        f"{name}, both nodes, {n} residues": (
            1 if s.tiny else 4, n, maker(path), normal((n, n, pair)),
        )
        for name, path in _TRIANGLES.items()
    }  # fmt: skip


def _alignments(s: Sizes) -> Parts:
    channels, pair, heads, rows, n = (16, 8, 2, 5, 12) if s.tiny else (256, 128, 8, 128, 256)
    layers = s.layers

    def make() -> nn.Module:
        cls = _imported("openfold.model.msa").MSARowAttentionWithPairBias
        made = [cls(channels, pair, channels // heads, heads) for _ in range(layers)]
        return _drawn(Rows(made))

    return {
        f"openfold_msa, {layers} attentions, {rows} sequences of {n} residues": (
            1 if s.tiny else 4, n, make, normal((rows, n, channels), (n, n, pair)),
        )
    }  # fmt: skip


def _pair_biases(s: Sizes) -> Parts:
    single, pair, heads, n = (16, 8, 2, 12) if s.tiny else (384, 128, 16, 512)
    layers = s.layers

    def boltz() -> nn.Module:
        cls = _imported("boltz.model.layers.attentionv2").AttentionPairBias
        made = [cls(single, pair, heads) for _ in range(layers)]
        return _drawn(PairBiased(made, lambda m, x, z, mask: m(x, z, mask, k_in=x)))

    def protenix() -> nn.Module:
        cls = _imported("protenix.model.modules.transformer").AttentionPairBias
        made = [cls(has_s=False, n_heads=heads, c_a=single, c_s=single, c_z=pair)
                for _ in range(layers)]  # fmt: skip
        for layer in made:  # which does nothing but fp32
            layer.attention.use_efficient_implementation = False
        return _drawn(PairBiased(made, lambda m, x, z, mask: m(x, None, z)))

    def openfold3() -> nn.Module:
        cls = _imported("openfold3.core.model.layers.attention_pair_bias").AttentionPairBias
        sizes = (single, single, single, single, pair, single // heads, heads)
        made = [cls(*sizes) for _ in range(layers)]
        return _drawn(PairBiased(made, lambda m, x, z, mask: m(x, z, mask=mask)))

    makers = {"boltz": boltz, "protenix": protenix, "openfold3": openfold3}
    return {
        f"{name}_pair_bias, {layers} attentions, {n} tokens": (
            s.few, n, make, normal((n, single), (n, n, pair)),
        )
        for name, make in makers.items()
    }  # fmt: skip


def _windows(s: Sizes) -> Parts:
    dim, heads, grid = (16, 2, (4, 12, 24)) if s.tiny else (192, 6, (8, 48, 96))
    side, features = (64, 12) if s.tiny else (96, 48)
    window, deep = (2, 6, 12), max(2, s.layers)  # every second one is shifted

    def pangu() -> nn.Module:
        from flashbias_convert.recipes.physicsnemo_pangu import MODULES

        layers = next(m for m in MODULES if _found(m))
        cls = _imported(layers.replace("attention_layers", "transformer_layers")).Transformer3DBlock
        shifts = ((0, 0, 0), tuple(w // 2 for w in window))
        blocks = [cls(dim, grid, heads, window, shifts[i % 2]) for i in range(deep)]
        return nn.Sequential(*blocks)

    def unetr() -> nn.Module:
        cls = _imported("monai.networks.nets.swin_unetr").SwinUNETR
        model: nn.Module = cls(in_channels=1, out_channels=2, feature_size=features)
        return model

    tokens = grid[0] * grid[1] * grid[2]
    return {
        f"physicsnemo_pangu, {deep} blocks": (
            1 if s.tiny else 4, 144, pangu, normal((tokens, dim)),
        ),
        f"monai_swin_unetr, {side} cubed": (
            1 if s.tiny else 4, 343, unetr, normal((1, side, side, side)),
        ),
    }  # fmt: skip
