"""Real models of recipes that are met less often; see `families`, which takes them in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torchvision
from timm.models.gcvit import GlobalContextVit
from torch import nn
from transformers.models.esm import configuration_esm, modeling_esmfold
from transformers.models.esmfold2 import configuration_esmfold2, modeling_esmfold2

from . import language, weather
from .case import Case, converted
from .given import images, normal, page_pairs, pairs, tokens
from .parts import FAMILY_MODES, FAMILY_WAYS, Parts, Sizes, of_timm, of_transformers


def parts(s: Sizes) -> Parts:
    """By the names of their rows."""
    return {**_vision(s), **_language(s), **_pairs(s)}


def _vision(s: Sizes) -> Parts:
    depths = (1, 1) if s.tiny else (2, 2, 2, 2)
    gcvit: dict[str, Any] = {"depths": depths, "num_heads": (4, 8, 16, 32), "embed_dim": 128}
    cr: dict[str, Any] = {"depths": depths}
    if s.tiny:
        gcvit |= {"img_size": 32, "window_size": (2, 2), "num_heads": (1, 2), "embed_dim": 16}
        cr |= {"img_size": 32, "patch_size": 2, "embed_dim": 32, "num_heads": (2, 4)}
        cr |= {"window_size": 4}
    video = (3, 4, 32, 32) if s.tiny else (3, 16, 224, 224)
    beit = {**s.bert(), "image_size": s.image, "use_relative_position_bias": True}
    return {
        "timm_gcvit, as base, 8 layers": (
            s.many, 196, lambda: GlobalContextVit(**gcvit), images(s.image),
        ),
        "timm_swinv2_cr, base, 8 layers": (
            s.many, 49, of_timm("swinv2_cr_base_224", **cr), images(s.image),
        ),
        "torchvision_maxvit, tiny": (s.many, 49, _maxvit(s.tiny), images(s.image)),
        "torchvision_mvit, small, 16 frames": (
            max(1, s.batch // 8), 25089, _mvit(s.tiny), normal(video),
        ),
        f"transformers_data2vec_vision, base, {s.layers} layers": (
            s.many, 197,
            of_transformers("Data2VecVisionModel", "Data2VecVisionConfig", **beit),
            images(s.image),
        ),
    }  # fmt: skip


def _maxvit(tiny: bool) -> Callable[[], nn.Module]:
    if not tiny:
        return lambda: torchvision.models.maxvit_t()
    sizes: dict[str, Any] = {"input_size": (32, 32), "stem_channels": 8, "partition_size": 4}
    sizes |= {"block_channels": [16, 32], "block_layers": [1, 1], "head_dim": 8}
    return lambda: torchvision.models.maxvit.MaxVit(**sizes, stochastic_depth_prob=0.0)


def _mvit(tiny: bool) -> Callable[[], nn.Module]:
    from torchvision.models.video import mvit

    if not tiny:
        return lambda: mvit.mvit_v2_s()
    layer = mvit.MSBlockConfig(
        num_heads=2, input_channels=16, output_channels=16, kernel_q=[3, 3, 3],
        kernel_kv=[3, 3, 3], stride_q=[1, 1, 1], stride_kv=[1, 2, 2],
    )  # fmt: skip
    kind = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True}
    return lambda: mvit.MViT((32, 32), 4, [layer, layer], **kind, proj_after_attn=True)


def _language(s: Sizes) -> Parts:
    few, n, words = s.few, s.text, s.vocabulary
    t5 = {"vocab_size": words, "d_model": s.dim, "d_kv": s.dim // s.heads, "d_ff": 4 * s.dim,
          "num_layers": s.layers, "num_heads": s.heads, "decoder_start_token_id": 0}  # fmt: skip
    long = {**t5, "encoder_attention_type": "transient-global"}
    # of several experts rounding may choose another: errors would say nothing
    switch = {**t5, "num_decoder_layers": s.layers, "num_experts": 1}
    text = {k: v for k, v in t5.items() if k != "d_model"}
    text |= {"hidden_size": s.dim, "initializer_range": 0.02}
    layers = f"base, {s.layers} + {s.layers} layers"
    audio: dict[str, Any] = {"num_blocks": s.layers}
    if s.tiny:
        audio |= {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
                  "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
                  "nemo_conv_channels": 8}  # fmt: skip
    return {
        f"transformers_longt5, base, 4 x text, {s.layers} layers": (
            few, 4 * n, of_transformers("LongT5EncoderModel", "LongT5Config", **long),
            tokens(4 * n, words, masked=True),
        ),
        f"transformers_switch, {layers}, one expert": (
            few, n,
            of_transformers("SwitchTransformersForConditionalGeneration",
                            "SwitchTransformersConfig", **switch),
            pairs(n, words, masked=True),
        ),
        f"transformers_udop, {layers}": (
            s.batch, n // 2,
            of_transformers("UdopForConditionalGeneration", "UdopConfig", **t5),
            page_pairs(n // 2, words),
        ),
        f"transformers_pix2struct, text of base, {s.layers} layers": (
            few, n, of_transformers("Pix2StructTextModel", "Pix2StructTextConfig", **text),
            tokens(n, words, use_cache=False),
        ),
        f"transformers_phi4_audio, 40 s, {s.layers} layers": (
            few, 16 if s.tiny else 500,
            of_transformers("Phi4MultimodalAudioModel", "Phi4MultimodalAudioConfig", **audio),
            normal((128 if s.tiny else 4000, 80), mask=None),
        ),
    }  # fmt: skip


class Chain(nn.Module):
    """Modules one after the other: what one of them takes alone, the host would decide."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Any, *rest: Any) -> Any:
        for module in self.inner:
            x = module(x, *rest)
        return x


class First(nn.Module):
    """The first thing that a module returns: the original has its attention weights behind it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)[0]


def _pairs(s: Sizes) -> Parts:
    """Half of the residues of a usual crop where there is a block: its pairs fill the memory.

    For that reason it has a batch of its own, too.
    """
    blocks = 1 if s.tiny else 4
    sequence, pair, head, n = (32, 16, 8, 12) if s.tiny else (1024, 128, 32, 256)

    def block() -> nn.Module:
        structure = {"sequence_dim": sequence, "pairwise_dim": pair}
        trunk = configuration_esm.TrunkConfig(
            num_blocks=1, sequence_state_dim=sequence, pairwise_state_dim=pair,
            sequence_head_width=head, pairwise_head_width=head, structure_module=structure,
        )  # fmt: skip
        return modeling_esmfold.EsmFoldTriangularSelfAttentionBlock(trunk)

    def attention() -> nn.Module:
        inner = modeling_esmfold.EsmFoldSelfAttention(sequence, heads, head, gated=True)
        return First(inner)

    def diffusion() -> nn.Module:
        module = {"hidden_size": dim, "num_attention_heads": width, "intermediate_size": 2 * dim}
        module |= {"num_hidden_layers": 1, "atom_encoder": {"output_dim": dim}}
        config = configuration_esmfold2.EsmFold2Config(structure_head={"diffusion_module": module})
        config._attn_implementation = "sdpa"
        part = config.structure_head.diffusion_module
        made = (modeling_esmfold2.EsmFold2DiffusionAttention(config, part) for _ in range(many))
        return Chain(*map(First, made))

    dim, width = (32, 4) if s.tiny else (768, 16)
    heads, many = sequence // head, 2 if s.tiny else 12
    return {
        f"transformers_esmfold_triangle, a block, {n} residues": (
            blocks, n, block, normal((n, sequence), (n, n, pair)),
        ),
        f"transformers_esmfold_sequence, one attention, {2 * n} residues": (
            s.few, 2 * n, attention, normal((2 * n, sequence), bias=(2 * n, 2 * n, heads)),
        ),
        f"transformers_esmfold2, {many} attentions of its diffusion, {2 * n} tokens": (
            s.batch, 2 * n, diffusion, normal((2 * n, dim), (width, 2 * n, 2 * n)),
        ),
    }  # fmt: skip


def of_this_package(s: Sizes) -> dict[str, Case]:
    """Models that no library has, by the names of the command line."""
    sizes = (s.layers, 32, 2, s.vocabulary) if s.tiny else (s.layers, 2048, 16, s.vocabulary)
    grid: dict[str, Any] = {"grid": (181, 360)}
    if s.tiny:
        grid = {"levels": 3, "grid": (24, 48), "dims": (24, 48, 48, 24), "heads": (2, 4, 4, 2)}
    found = {
        f"alibi_gpt2, 2048 wide, {s.layers} layers": language.prefill(
            "", language.gpt2(*sizes), s.few, s.text
        ),
        "pangu, 181 x 360": weather.pangu("", depths=(2, 2, 2, 2), **grid),
    }

    def alter(model: nn.Module, way: str) -> nn.Module:
        return converted(model, way, force=s.tiny)

    same: dict[str, Any] = {"ways": FAMILY_WAYS, "modes": FAMILY_MODES, "alter": alter}
    return {name: replace(case, name=name, **same) for name, case in found.items()}
