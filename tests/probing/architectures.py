"""Small models of many kinds with random weights, and inputs for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

from tests.pangu import fields
from tests.pangu import make as make_pangu

#: parts of the names of parameters that make biases: at initialisation they are zero, or small
_BIASES = (
    "attention_biases", "bias_mlp", "bias_table", "bias_values", "cpb_mlp", "rel_attn", "rel_embed",
    "rel_pos", "relative_attention_bias",
)  # fmt: skip
_IMAGE = {"img_size": 32, "embed_dim": 16, "num_classes": 3}
_WORDS = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_WAVES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "conv_dim": (8, 8), "conv_stride": (10, 8), "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
Made = tuple[nn.Module, Any]


def normal(*shape: int) -> Tensor:
    """Normally distributed, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def words(count: int = 3, length: int = 18) -> dict[str, Tensor]:
    """Tokens that are no padding."""
    generator = torch.Generator().manual_seed(2)
    return {"input_ids": torch.randint(3, 30, (count, length), generator=generator)}


def made(make: Callable[[], Made]) -> Callable[[], Made]:
    """The function with reproducible weights, at which the bias matters."""

    @functools.wraps(make)
    def wrapped() -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, inputs = make()
            for name, parameter in model.named_parameters():
                if any(part in name for part in _BIASES):
                    parameter.data.normal_()
                if "norm" in name and name.endswith("weight"):
                    parameter.data.add_(0.5)
        return model.eval(), inputs

    return wrapped


def unhidden(model: nn.Module) -> nn.Module:
    """With ones where fresh weights are next to zero, so that no block adds anything."""
    for name, parameter in model.named_parameters():
        if name.endswith(("bn.weight", "gamma")):
            nn.init.ones_(parameter)
    return model


def hugging_face(config: str, model: str, inputs: Any, **options: Any) -> Made:
    built = getattr(transformers, model)(getattr(transformers, config)(**options))
    return built, inputs


@made
def swinv2() -> Made:
    depths = {"depths": (2, 1), "num_heads": (1, 2), "window_size": 8, "patch_size": 2}
    return timm.create_model("swinv2_tiny_window8_256", **_IMAGE, **depths), normal(2, 3, 32, 32)


@made
def swin() -> Made:
    depths = {"depths": (2, 1), "num_heads": (2, 2), "window_size": 4, "patch_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", **_IMAGE, **depths)
    return model, normal(2, 3, 32, 32)


@made
def beit() -> Made:
    sizes = {"depth": 1, "num_heads": 2, "patch_size": 8}
    return timm.create_model("beit_base_patch16_224", **_IMAGE, **sizes), normal(2, 3, 32, 32)


@made
def vit() -> Made:
    sizes = {"depth": 1, "num_heads": 2, "patch_size": 8}
    return timm.create_model("vit_tiny_patch16_224", **_IMAGE, **sizes), normal(2, 3, 32, 32)


@made
def t5() -> Made:
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2}
    answers = {**words(), "decoder_input_ids": words(3, 16)["input_ids"]}
    return hugging_face("T5Config", "T5Model", answers, num_heads=2, **sizes)


@made
def mpnet() -> Made:
    return hugging_face("MPNetConfig", "MPNetModel", words(), intermediate_size=16, **_WORDS)


@made
def bloom() -> Made:
    sizes = {"vocab_size": 30, "hidden_size": 16, "n_layer": 2, "n_head": 4}
    return hugging_face("BloomConfig", "BloomModel", words(), **sizes)


@made
def mpt() -> Made:
    sizes = {"vocab_size": 30, "d_model": 16, "n_layers": 1, "n_heads": 4, "max_seq_len": 32}
    return hugging_face("MptConfig", "MptModel", words(), **sizes)


def falcon(attention: str = "sdpa") -> Made:
    @made
    def build() -> Made:
        options = {"alibi": True, "multi_query": False, "attn_implementation": attention}
        return hugging_face("FalconConfig", "FalconModel", words(), **_WORDS, **options)

    return build()


def sam(attention: str = "sdpa") -> Made:
    @made
    def build() -> Made:
        sizes = {"image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [1]}
        width = {"hidden_size": 16, "mlp_dim": 16, "output_channels": 8, "initializer_range": 0.3}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
        images = {"pixel_values": normal(6, 3, 32, 32)}
        options = {**sizes, **width, **layers, "attn_implementation": attention}
        return hugging_face("SamVisionConfig", "SamVisionModel", images, **options)

    return build()


@made
def wavlm() -> Made:
    waves = {"input_values": normal(3, 1500)}
    return hugging_face("WavLMConfig", "WavLMModel", waves, **_WAVES)


@made
def deberta() -> Made:
    kinds = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}
    sizes = {**_WORDS, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    more = {"share_att_key": True, "norm_rel_ebd": "layer_norm"}
    return hugging_face(
        "DebertaV2Config", "DebertaV2Model", words(12, 16), **sizes, **kinds, **more
    )


def boxes() -> Tensor:
    """Where the tokens of `words` are on a page."""
    corners = torch.randint(0, 20, (3, 18, 4), generator=torch.Generator().manual_seed(3))
    return corners + torch.tensor([0, 0, 20, 20])


@made
def lilt() -> Made:
    sizes = {**_WORDS, "hidden_size": 48, "intermediate_size": 16, "num_hidden_layers": 1}
    inputs = {**words(), "bbox": boxes()}
    return hugging_face("LiltConfig", "LiltModel", inputs, max_2d_position_embeddings=64, **sizes)


@made
def layoutlmv3() -> Made:
    sizes = {**_WORDS, "intermediate_size": 16, "num_hidden_layers": 1, "visual_embed": False}
    places = {"max_2d_position_embeddings": 64, "coordinate_size": 3, "shape_size": 2}
    inputs = {**words(), "bbox": boxes()}
    return hugging_face("LayoutLMv3Config", "LayoutLMv3Model", inputs, **sizes, **places)


@made
def phi4_audio() -> Made:
    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2,
        "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "input_size": 16,
        "nemo_conv_channels": 4, "time_reduction": 4, "bias_max_distance": 12,
    }  # fmt: skip
    config = transformers.Phi4MultimodalAudioConfig(**sizes)
    return transformers.Phi4MultimodalAudioModel(config), (normal(2, 80, 16), None)


@made
def swinv2_of_transformers() -> Made:
    images = {"pixel_values": normal(2, 3, 32, 32)}
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4}
    layers = {"depths": [2], "num_heads": [2]}
    return hugging_face("Swinv2Config", "Swinv2Model", images, **sizes, **layers)


@made
def swin_of_transformers() -> Made:
    images = {"pixel_values": normal(2, 3, 32, 32)}
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4}
    layers = {"depths": [2], "num_heads": [2]}
    return hugging_face("SwinConfig", "SwinModel", images, **sizes, **layers)


def beit_of_transformers(kind: str = "use_relative_position_bias") -> Made:
    @made
    def build() -> Made:
        images = {"pixel_values": normal(2, 3, 32, 32)}
        sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
        return hugging_face("BeitConfig", "BeitModel", images, **sizes, **layers, **{kind: True})

    return build()


@made
def esmfold() -> Made:
    """Triangles of 12 residues in 3 structures: 36 rows with the bias of their structure."""
    from transformers.models.esm import configuration_esm, modeling_esmfold

    trunk = configuration_esm.TrunkConfig(
        num_blocks=1, sequence_state_dim=32, pairwise_state_dim=16,
        sequence_head_width=8, pairwise_head_width=8,
        structure_module={"sequence_dim": 32, "pairwise_dim": 16},
    )  # fmt: skip
    model = modeling_esmfold.EsmFoldTriangularSelfAttentionBlock(trunk)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.3)
    states = {"sequence_state": normal(3, 12, 32), "pairwise_state": normal(3, 12, 12, 16)}
    return model, states


@made
def xlnet() -> Made:
    sizes = {"vocab_size": 30, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    return hugging_face("XLNetConfig", "XLNetModel", words(), **sizes)


@made
def levit() -> Made:
    from timm.models.levit import Levit

    sizes = {"embed_dim": (16, 32), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 3)}
    return Levit(img_size=96, num_classes=3, **sizes), normal(2, 3, 96, 96)


@made
def levit_of_transformers() -> Made:
    sizes = {"hidden_sizes": (16, 24, 32), "key_dim": (8, 8, 8), "depths": (1, 1, 1)}
    config = transformers.LevitConfig(image_size=96, num_attention_heads=(2, 3, 4), **sizes)
    return transformers.LevitModel(config), {"pixel_values": normal(2, 3, 96, 96)}


@made
@made
def efficientformer() -> Made:
    from timm.models.efficientformer import EfficientFormer

    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "num_vit": 1}
    return unhidden(EfficientFormer(num_classes=3, **sizes)), normal(2, 3, 224, 224)


@made
def efficientvit() -> Made:
    from timm.models.efficientvit_msra import EfficientVitMsra

    sizes = {"embed_dim": (32, 48, 64), "key_dim": (8, 8, 8), "num_heads": (2, 3, 4)}
    model = EfficientVitMsra(img_size=96, window_size=(3, 3, 3), num_classes=3, **sizes)
    return unhidden(model), normal(2, 3, 96, 96)


@made
def mvit() -> Made:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    cfg = MultiScaleVitCfg(depths=(1, 1), embed_dim=(8, 16), num_heads=(1, 2), use_cls_token=True)
    return MultiScaleVit(cfg, img_size=(32, 32), num_classes=3), normal(2, 3, 32, 32)


def pangu() -> Made:
    model = make_pangu(depths=(2, 1, 1, 1))
    return model, fields(model, 1)
