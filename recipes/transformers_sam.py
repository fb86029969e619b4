"""SAM of transformers, its copies and SegGPT: relative positions decomposed into two axes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.fallback import WEIGHTS, say_original, weights_are_recorded
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Recipe, Site


class SamVisionAttention(PatchedAttention):
    """`SamVisionAttention`; the bias is made of queries that are not scaled."""

    num_attention_heads: int
    scale: float
    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter
    qkv: nn.Linear
    proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # the rows are made anew in each call

    def flashbias_forward(
        self, hidden_states: Tensor, output_attentions: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if output_attentions or weights_are_recorded():
            say_original(WEIGHTS)
            original: tuple[Tensor, Tensor] = self.original_forward(
                hidden_states, output_attentions
            )
            return original
        return self.attend(hidden_states, self.num_attention_heads), None

    def attend(self, hidden_states: Tensor, heads: int) -> Tensor:
        """Attention inside a map or windows, (B, H, W, C) to the same."""
        height, width = hidden_states.shape[1:3]
        qkv = self.qkv(hidden_states.flatten(1, 2)).unflatten(-1, (3, heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # views, (B, heads, H * W, D)
        tables = {
            "rel_h": self.relative(height, self.rel_pos_h),
            "rel_w": self.relative(width, self.rel_pos_w),
        }
        built = {"axial_rows": {"q": q, **tables}}
        out = self.score_bias(q, k, v, built=built, scale=self.scale)
        return self.proj(out.transpose(1, 2).flatten(2).unflatten(1, (height, width)))

    def relative(self, size: int, table: Tensor) -> Tensor:
        """What belongs to each pair of rows, (size, size, D), interpolated if need be."""
        found: Tensor = self.get_rel_pos(size, size, table)  # type: ignore[operator]
        return found


def describe(site: Site) -> Description:
    """Rows of the queries' products, made in each call."""
    module: Any = site.module
    uses = getattr(module, "use_rel_pos", None)
    if not (module.use_relative_position_embeddings if uses is None else uses):
        raise NoBias("it uses no relative positions")
    heads = getattr(module, "num_attention_heads", None) or module.num_heads
    n = ((len(module.rel_pos_h) + 1) // 2) * ((len(module.rel_pos_w) + 1) // 2)
    return Description(None, heads, n, n, module.rel_pos_h.shape[-1], builders=("axial_rows",))


_COPIES = {
    "deepseek_ocr2": ("DeepseekOcr2SamVisionAttention", "DeepseekOcr2SamVisionSdpaAttention"),
    "got_ocr2": ("GotOcr2VisionAttention",),
    "pp_formulanet": ("PPFormulaNetVisionAttention",),
    "sam": ("SamVisionAttention", "SamVisionSdpaAttention"),
    "sam_hq": ("SamHQVisionAttention", "SamHQVisionSdpaAttention"),
    "seggpt": ("SegGptAttention",),
    "slanext": ("SLANeXtVisionAttention",),
    "unlimited_ocr": ("UnlimitedOcrSamVisionAttention", "UnlimitedOcrSamVisionSdpaAttention"),
}

recipe = Recipe(
    name="transformers_sam",
    title="SAM, SAM-HQ, SegGPT and OCR models (transformers)",
    classes=tuple(
        f"transformers.models.{name}.modeling_{name}.{cls}"
        for name, classes in _COPIES.items()
        for cls in classes
    ),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=SamVisionAttention,
    describe=describe,
    about=About(
        models=(
            "SAM, SAM-HQ, SegGPT, the encoders of GOT-OCR2, DeepSeek-OCR2, PP-FormulaNet, "
            "SLANeXt, Unlimited-OCR; any map"
        ),
        exact="rows and columns of relative positions, made of the queries of each call",
        n="196 and 4096",
    ),
)
