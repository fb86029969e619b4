"""One real model for every recipe: classes of timm, torchvision and transformers, and others.

Those of other libraries are there where the library is installed (`foreign`); classes that no
package offers are written anew (`copies`).

Widths are those of published models, depths are mostly cut, so that compiling does not take all
the time; names say how many layers there are. Weights are random, and tables of biases large enough
to matter. The original is compared with what this package makes of it, both compiled.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from . import documents, foreign, rarer, repositories
from .case import Case
from .given import Inputs, images, pages, pairs, sound, tokens
from .parts import Parts, Sizes, family, lively, of_timm, of_torchvision, of_transformers


def cases(tiny: bool = False) -> dict[str, Case]:
    """By the names of the command line, all of which begin with "family-"."""
    s = Sizes(tiny)
    made = {**_timm(s), **_levit(s), **_efficient(s), **_vision(s), **_language(s), **_others(s)}
    for room in (rarer, documents, repositories, foreign):
        made |= room.parts(s)
    found = {name: family(name, *rest, tiny=tiny) for name, rest in made.items()}
    for name in found:
        if name.partition(",")[0] in foreign.STRIDES_AS_THEY_ARE:
            found[name] = dataclasses.replace(found[name], pads_strides=False)
    found |= rarer.of_this_package(s)
    return {f"family-{name}": case for name, case in found.items()}


def _timm(s: Sizes) -> Parts:
    if s.tiny:
        swin: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (1, 1)}
        swin |= {"num_heads": (1, 2), "window_size": 4}
        size = 32
        beit: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2}
        tiny_vit: dict[str, Any] = {"embed_dims": (16, 32, 32, 32), "depths": (1, 1, 1, 1)}
        tiny_vit |= {"num_heads": (1, 2, 2, 2), "window_sizes": (4, 4, 4, 2)}
        sam: dict[str, Any] = {**beit, "window_size": 2, "global_attn_indexes": ()}
        mvit: dict[str, Any] = {"img_size": 64}
    else:
        swin = {"depths": (2, 2, 2, 2)}
        size = 224
        beit = {"depth": s.layers}
        sam = {"depth": s.layers, "img_size": 512, "global_attn_indexes": (1, 3)}
        mvit, tiny_vit = {}, {}
    pooled, square = 64 if s.tiny else 224, images(256)

    def of_size(full: int) -> Inputs:
        return images(32 if s.tiny else full)

    relpos = {k: v for k, v in beit.items() if k != "img_size" or s.tiny}
    return {
        "timm_swinv2, tiny, 8 layers": (
            s.many, 256, of_timm("swinv2_tiny_window16_256", **swin), of_size(256),
        ),
        "timm_swin, base 384, 8 layers": (
            s.batch, 144, of_timm("swin_base_patch4_window12_384", **swin), of_size(384),
        ),
        f"timm_beit, base 384, {s.layers} layers": (
            s.batch, 577, of_timm("beit_base_patch16_384", **beit), of_size(384),
        ),
        f"timm_rel_pos, ViT medium, {s.layers} layers": (
            s.many, 196, of_timm("vit_relpos_medium_patch16_224", **relpos), images(size),
        ),
        "timm_tiny_vit, 21M 384": (
            s.batch, 576, of_timm("tiny_vit_21m_384", **tiny_vit), images(64 if s.tiny else 384),
        ),
        f"timm_sam, base 512, {s.layers} layers": (
            s.few, 1024, of_timm("samvit_base_patch16", **sam), of_size(512),
        ),
        "timm_mvitv2, tiny": (s.many, 3136, of_timm("mvitv2_tiny", **mvit), images(pooled)),
        "timm_bottleneck, BoTNet 26t 256": (
            s.many, 256, lambda: lively(of_timm("botnet26t_256")(), square), square,
        ),
        "timm_halo, HaloNet 26t 256": (
            s.many, 64, lambda: lively(of_timm("halonet26t")(), square), square,
        ),
        "timm_rel_pos, MaxViT tiny 224": (
            s.many, 49, of_timm("maxvit_tiny_tf_224", **_staged(s)), images(pooled),
        ),
        "timm_rel_pos, CoAtNet 1 224": (
            s.many, 196, of_timm("coatnet_1_rw_224", **_staged(s)), images(pooled),
        ),
    }  # fmt: skip


def _levit(s: Sizes) -> Parts:
    """Both copies; one call of so small a model takes many images, else its host decides."""
    size = 96 if s.tiny else 224
    small: dict[str, Any] = {"img_size": size, "embed_dim": (16, 32), "depth": (1, 1)}
    small |= {"num_heads": (1, 2), "key_dim": 8}
    wide: dict[str, Any] = {"image_size": size, "hidden_sizes": (384, 512, 768)}
    wide |= {"num_attention_heads": (6, 9, 12), "key_dim": (32, 32, 32)}
    if s.tiny:
        wide |= {"hidden_sizes": (16, 24, 32), "num_attention_heads": (1, 2, 3)}
        wide |= {"key_dim": (8, 8, 8), "depths": (1, 1, 1)}
    of_timms = of_timm("levit_384", **(small if s.tiny else {}))
    copied = of_transformers("LevitModel", "LevitConfig", **wide)
    batch, given = 1 if s.tiny else 4 * s.many, images(size)
    return {
        "timm_levit, 384": (batch, 196, lambda: lively(of_timms(), given), given),
        "transformers_levit, as 384": (batch, 196, lambda: lively(copied(), given), given),
    }


def _efficient(s: Sizes) -> Parts:
    """Small networks with tables like LeViT's, and as many images.

    Each block has many small layers, of which a compiler makes little: most blocks are left out.
    """
    cascade: dict[str, Any] = {"depth": (1, 1, 1)}  # of 1, 3 and 4
    former: dict[str, Any] = {"depths": (1, 1, 2, 4)}  # of 4, 4, 12 and 6, of which 4 attend
    # of 5, 5, 15 and 10, of which 6 and 6 mix heads
    second: dict[str, Any] = {"depths": (2, 2, 2, 2), "num_vit": 1}
    if s.tiny:
        cascade |= {"img_size": 96, "embed_dim": (32, 48, 64), "key_dim": (8, 8, 8)}
        cascade |= {"num_heads": (2, 3, 4), "window_size": (3, 3, 3)}
        former = {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 24, 32)}
        second = {**former, "depths": (1, 1, 2, 2), "img_size": 64, "mlp_ratios": 2}
    of_msra = of_timm("efficientvit_m5", **cascade)
    first = of_timm("efficientformer_l3", **former)
    then = of_timm("efficientformerv2_l", **second)
    batch = 1 if s.tiny else 4 * s.many
    maps, usual, small = (images(size) for size in ((96, 224, 64) if s.tiny else (224,) * 3))
    return {
        "timm_efficientvit, M5, 3 blocks": (batch, 49, lambda: lively(of_msra(), maps), maps),
        "timm_efficientformer, L3, 8 blocks": (batch, 49, lambda: lively(first(), usual), usual),
        "timm_efficientformer_v2, L, 8 blocks": (batch, 49, lambda: lively(then(), small), small),
    }


def _staged(s: Sizes) -> dict[str, Any]:
    """What MaxViT and CoAtNet take of timm's builder."""
    small = {"img_size": 64, "embed_dim": (32, 32, 32, 32), "depths": (1, 1, 1, 1)}
    return {**small, "stem_width": 16} if s.tiny else {}


def _vision(s: Sizes) -> Parts:
    heads = [1, 2] if s.tiny else [3, 6, 12, 24]
    dim, window = (16, 4) if s.tiny else (96, 7)
    swin = {"image_size": 32 if s.tiny else 224, "embed_dim": dim, "depths": [2] * len(heads),
            "num_heads": heads, "window_size": window}  # fmt: skip
    swin2 = {**swin, "image_size": 32 if s.tiny else 256, "window_size": 4 if s.tiny else 16}
    sam_size = 32 if s.tiny else 512
    sam = {**s.bert(), "mlp_dim": 4 * s.dim, "image_size": sam_size, "output_channels": 16,
           "window_size": 2 if s.tiny else 14, "global_attn_indexes": [0],
           "initializer_range": 0.02}  # fmt: skip
    sam.pop("intermediate_size")
    vitdet = {**s.bert(), "image_size": sam_size, "window_size": 2 if s.tiny else 14,
              "window_block_indices": [1], "use_relative_position_embeddings": True}  # fmt: skip
    vitdet.pop("intermediate_size")
    return {
        "torchvision_swin, tiny, 8 layers": (
            s.many, window**2, of_torchvision(window, heads, dim), images(s.image),
        ),
        "transformers_swin, tiny, 8 layers": (
            s.many, window**2, of_transformers("SwinModel", "SwinConfig", **swin), images(s.image),
        ),
        "transformers_swinv2, tiny, 8 layers": (
            s.many, 256, of_transformers("Swinv2Model", "Swinv2Config", **swin2),
            images(32 if s.tiny else 256),
        ),
        "transformers_donut_swin, tiny, 8 layers": (
            s.many, window**2, of_transformers("DonutSwinModel", "DonutSwinConfig", **swin),
            images(s.image),
        ),
        f"transformers_beit, base, {s.layers} layers": (
            s.many, 197,
            of_transformers("BeitModel", "BeitConfig", **s.bert(), image_size=s.image,
                            use_relative_position_bias=True),
            images(s.image),
        ),
        f"transformers_sam, base 512, {s.layers} layers": (
            s.batch, 1024, of_transformers("SamVisionModel", "SamVisionConfig", **sam),
            images(sam_size),
        ),
        f"transformers_vitdet, base 512, {s.layers} layers": (
            s.batch, 1024, of_transformers("VitDetModel", "VitDetConfig", **vitdet),
            images(sam_size),
        ),
    }  # fmt: skip


def _language(s: Sizes) -> Parts:
    few, n, words = s.few, s.text, s.vocabulary
    ids = tokens(n, words, use_cache=False)
    wide, heads = (32, 2) if s.tiny else (2048, 16)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": words}
    t5 = {"vocab_size": words, "d_model": s.dim, "d_kv": s.dim // s.heads, "d_ff": 4 * s.dim,
          "num_layers": s.layers, "num_heads": s.heads, "decoder_start_token_id": 0}  # fmt: skip
    return {
        f"transformers_bloom, 2048 wide, {s.layers} layers": (
            few, n,
            of_transformers("BloomForCausalLM", "BloomConfig", hidden_size=wide, n_layer=s.layers,
                            n_head=heads, **special),
            ids,
        ),
        f"transformers_mpt, 2048 wide, {s.layers} layers": (
            few, n,
            of_transformers("MptForCausalLM", "MptConfig", d_model=wide, n_layers=s.layers,
                            n_heads=heads, max_seq_len=n, **special),
            ids,
        ),
        f"transformers_falcon, 2048 wide, {s.layers} layers": (
            few, n,
            of_transformers("FalconForCausalLM", "FalconConfig", hidden_size=wide,
                            num_hidden_layers=s.layers, num_attention_heads=heads, alibi=True,
                            multi_query=False, new_decoder_architecture=False, **special),
            ids,
        ),
        f"transformers_mpnet, base, {s.layers} layers": (
            s.batch, n // 2,
            of_transformers("MPNetModel", "MPNetConfig", **s.bert(), vocab_size=words,
                            max_position_embeddings=n + 2),
            tokens(n // 2, words),
        ),
        f"transformers_t5, base, {s.layers} + {s.layers} layers": (
            few, n, of_transformers("T5ForConditionalGeneration", "T5Config", **t5),
            pairs(n, words),
        ),
        # before transformers 5.18 its decoder is not converted
        f"transformers_umt5, encoder of base, {s.layers} layers": (
            few, n, of_transformers("UMT5EncoderModel", "UMT5Config", **t5), tokens(n, words),
        ),
    }  # fmt: skip


def _others(s: Sizes) -> Parts:
    n = s.text // 2
    page = {**s.bert(), "vocab_size": s.vocabulary, "max_position_embeddings": n + 2}
    layout = {**page, "visual_embed": False}
    seconds = 0.05 if s.tiny else 10.0
    wavlm = {**s.bert(), "layerdrop": 0.0, "mask_time_prob": 0.0}
    if s.tiny:
        page |= {"hidden_size": 48}
        layout |= {"coordinate_size": 5, "shape_size": 6}
        wavlm |= {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8),
                  "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}  # fmt: skip
    return {
        f"transformers_wavlm, base, 10 s, {s.layers} layers": (
            max(1, s.batch // 2), math.ceil(50 * seconds),
            of_transformers("WavLMModel", "WavLMConfig", **wavlm), sound(int(16000 * seconds)),
        ),
        f"transformers_lilt, base, {s.layers} layers": (
            s.batch, n, of_transformers("LiltModel", "LiltConfig", **page),
            pages(n - 2, s.vocabulary),
        ),
        f"transformers_layoutlmv3, base, {s.layers} layers": (
            s.batch, n, of_transformers("LayoutLMv3Model", "LayoutLMv3Config", **layout),
            pages(n - 2, s.vocabulary),
        ),
    }  # fmt: skip
