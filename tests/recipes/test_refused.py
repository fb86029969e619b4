"""Attention that is not converted is listed with the reason, and stays as it is."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashbias_convert import inspect_model, patch_model
from flashbias_convert.checkpoint.convert import require_patched
from flashbias_convert.errors import NothingToConvertError
from flashbias_convert.recipe import Registry
from tests.recipes.model_parity import file_of

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip


def cait() -> nn.Module:
    from timm.models.cait import Cait

    model: nn.Module = Cait(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2)
    return model


def efficientformer_v2() -> nn.Module:
    from timm.models.efficientformer_v2 import Attention2d

    return nn.ModuleList([Attention2d(16, key_dim=8, num_heads=2, resolution=4)])


def deberta(version: str) -> nn.Module:
    positions = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    config = getattr(transformers, f"Deberta{version}Config")(**SMALL, **positions)
    model: nn.Module = getattr(transformers, f"Deberta{version}Model")(config)
    return model


def xlnet() -> nn.Module:
    config = transformers.XLNetConfig(vocab_size=19, d_model=16, n_layer=2, n_head=2, d_inner=16)
    model: nn.Module = transformers.XLNetModel(config)
    return model


def conformer(positions: str) -> nn.Module:
    config = transformers.Wav2Vec2BertConfig(
        **{k: v for k, v in SMALL.items() if k != "vocab_size"},
        position_embeddings_type=positions, feature_projection_input_dim=8,
    )  # fmt: skip
    model: nn.Module = transformers.Wav2Vec2BertModel(config)
    return model


def speech_t5() -> nn.Module:
    from transformers.models.speecht5.modeling_speecht5 import SpeechT5DecoderLayer as Decoder
    from transformers.models.speecht5.modeling_speecht5 import SpeechT5EncoderLayer as Encoder

    config = transformers.SpeechT5Config(
        hidden_size=16, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    return nn.ModuleList([Encoder(config), Decoder(config)])


def attention_of(family: str, config: str, *classes: str, **sizes: Any) -> nn.Module:
    """The attention classes of a family of transformers, without the model around them."""
    module = file_of(family)
    settings = getattr(transformers, config)(**sizes)
    layers = [getattr(module, name) for name in classes]
    needs_index = ["layer_idx" in inspect.signature(layer).parameters for layer in layers]
    return nn.ModuleList(
        [
            c(settings, **{"layer_idx": 0} if i else {})
            for c, i in zip(layers, needs_index, strict=True)
        ]
    )


def inkling(family: str, config: str, *classes: str) -> nn.Module:
    return attention_of(
        family, config, *classes, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, swa_num_attention_heads=2, swa_num_key_value_heads=2,
        swa_head_dim=8, sliding_window_size=8, rel_extent=8, d_rel=4,
    )  # fmt: skip


def granite(plus: bool) -> nn.Module:
    if plus:
        return attention_of(
            "granite_speech_plus", "GraniteSpeechPlusEncoderConfig",
            "GraniteSpeechPlusConformerAttention", hidden_dim=16, num_heads=2, context_size=8,
        )  # fmt: skip
    return attention_of(
        "granite_speech5", "GraniteSpeech5EncoderConfig", "GraniteSpeech5EncoderAttention",
        hidden_size=16, num_attention_heads=2, head_dim=8, context_size=8,
    )  # fmt: skip


def cpm_ant() -> nn.Module:
    config = transformers.CpmAntConfig(
        vocab_size=19, hidden_size=16, num_attention_heads=2, dim_head=8, dim_ff=16,
        num_hidden_layers=2,
    )  # fmt: skip
    model: nn.Module = transformers.CpmAntModel(config)
    return model


def dinat() -> nn.Module:
    """Without NATTEN, which runs it, it can be made all the same."""
    config = transformers.DinatConfig()
    layer: nn.Module = file_of("dinat").NeighborhoodAttention(config, 16, 2, 3, 1)
    return nn.ModuleList([layer])


def stand_in(path: str, **parts: Any) -> nn.Module:
    """A module of a class that is known by that name, which nobody can install here."""
    module, _, name = path.rpartition(".")
    made: nn.Module = type(name, (nn.Module,), {"__module__": module})()
    for part, value in parts.items():
        setattr(made, part, value)
    return made


def natten() -> nn.Module:
    """Modules of NATTEN itself; newer ones have no table."""
    parts = {"kernel_size": (3, 3), "dilation": (1, 1)}
    table = nn.Parameter(torch.zeros(2, 5, 5))
    path = "natten.na2d.NeighborhoodAttention2D"
    return nn.ModuleDict(
        {"biased": stand_in(path, rpb=table, **parts), "bare": stand_in(path, rpb=None, **parts)}
    )


def aurora() -> nn.Module:
    return nn.Sequential(stand_in("aurora.model.swin3d.WindowAttention", window_size=(2, 6, 12)))


class SpatialBias(nn.Module):
    """Has the parts of the class, whose forward takes factors and needs a card."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, dim // heads
        self.scale = self.dim_head**-0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))
        self.pos_weight = nn.Linear(self.dim_head, 1, bias=False)


def spatial_bias() -> nn.Module:
    """Under its name in the library."""
    path = "models.Transformer_Spatial_Bias"
    cls = type("Spatial_Bias_Attention", (SpatialBias,), {"__module__": path})
    return nn.Sequential(cls())


def prophetnet() -> nn.Module:
    config = transformers.ProphetNetConfig(
        vocab_size=19, hidden_size=16, num_encoder_layers=1, num_decoder_layers=2,
        num_encoder_attention_heads=2, num_decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=16,
    )  # fmt: skip
    model: nn.Module = transformers.ProphetNetModel(config)
    return model


def pool_first() -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    config = MultiScaleVitCfg(depths=(1, 1), embed_dim=(16, 32), num_heads=(1, 2), pool_first=True)
    model: nn.Module = MultiScaleVit(config, img_size=32)
    return model


def monai_block(name: str, **settings: Any) -> nn.Module:
    blocks = pytest.importorskip("monai.networks.blocks")
    block: nn.Module = getattr(blocks, name)(16, **{"num_heads": 2, **settings})
    return block


def monai_positions() -> nn.Module:
    """On maps and in volumes."""
    sizes = {"SABlock": (4, 4), "CrossAttentionBlock": (2, 2, 4)}
    return nn.ModuleList(
        monai_block(name, rel_pos_embedding="decomposed", input_size=size)
        for name, size in sizes.items()
    )


def graphormer() -> nn.Module:
    return nn.ModuleList(
        [
            stand_in("graphormer.modules.multihead_attention.MultiheadAttention"),
            stand_in(
                "transformers.models.deprecated.graphormer.modeling_graphormer"
                ".GraphormerMultiheadAttention"
            ),
        ]
    )


SECOND = ("Inkling2SlidingAttention", "Inkling2FullAttention")
LOOP = ("Inkling2LoopSlidingAttention", "Inkling2LoopFullAttention")
CASES: dict[str, tuple[Any, dict[str, int], str]] = {
    "CaiT": (cait, {"unsupported": 2}, "mixes its heads"),
    "EfficientFormer V2": (efficientformer_v2, {"unsupported": 1}, "mixes its heads"),
    "DeBERTa": (lambda: deberta(""), {"unsupported": 2}, "full rank"),
    "DeBERTa V2": (lambda: deberta("V2"), {"unsupported": 2}, "full rank"),
    "XLNet": (xlnet, {"unsupported": 2}, "relative shift"),
    "Conformer": (lambda: conformer("relative_key"), {"unsupported": 2}, "relative shift"),
    "Granite Speech 5": (lambda: granite(plus=False), {"unsupported": 1}, "relative shift"),
    "Granite Speech Plus": (lambda: granite(plus=True), {"unsupported": 1}, "relative shift"),
    "Inkling": (
        lambda: inkling("inkling", "InklingTextConfig", "InklingAttention"),
        {"unsupported": 1}, "profiles of the distance",
    ),
    "Inkling 2": (
        lambda: inkling("inkling2", "Inkling2TextConfig", *SECOND),
        {"unsupported": 2}, "profiles of the distance",
    ),
    "Inkling 2 Loop": (
        lambda: inkling("inkling2_loop", "Inkling2LoopTextConfig", *LOOP),
        {"unsupported": 2}, "profiles of the distance",
    ),
    "CPM-Ant": (cpm_ant, {"unsupported": 2}, "segments of each batch"),
    "DiNAT": (dinat, {"unsupported": 1}, "around it alone"),
    "Aurora": (aurora, {"left alone": 1}, "no relative positions"),
    "Graphormer": (graphormer, {"unsupported": 2}, "full rank"),
    "Transformer_Spatial_Bias": (spatial_bias, {"unsupported": 1}, "FlashBias's own kernel"),
    "ProphetNet": (prophetnet, {"unsupported": 2}, "buckets of the distance"),
    "MViTv2, pooled first": (pool_first, {"unsupported": 2}, "own forward of it raises"),
    "MONAI": (monai_positions, {"unsupported": 2}, "no network of MONAI"),
    "rotary Conformer": (lambda: conformer("rotary"), {"left alone": 2}, "no relative positions"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sites_are_listed_with_the_reason(name: str) -> None:
    make, counts, reason = CASES[name]
    model = make()
    before = [type(module) for module in model.modules()]
    plan = patch_model(model, force_all=True)
    assert plan.counts() == counts
    assert all(reason in site.reason for site in plan.sites)
    assert [type(module) for module in model.modules()] == before


def test_decoders_of_speech_t5_have_no_positions() -> None:
    status = {site.name: site.status for site in inspect_model(speech_t5()).sites}
    assert status == {
        "0.attention": "unsupported", "1.self_attn": "left alone", "1.encoder_attn": "left alone"
    }  # fmt: skip


def test_neighbourhoods_without_a_table_are_left_alone() -> None:
    status = {site.name: site.status for site in inspect_model(natten()).sites}
    assert status == {"biased": "unsupported", "bare": "left alone"}


def test_attention_of_torch_is_none_of_those_by_its_name() -> None:
    assert Registry().find(nn.MultiheadAttention(16, 2)) is None


def test_convit_mixes_two_softmaxes() -> None:
    from timm.models.convit import GPSA

    (site,) = inspect_model(GPSA(16, num_heads=2)).sites
    assert site.status == "unsupported" and "softmax" in site.reason


def test_a_model_with_both_is_converted_as_far_as_it_goes() -> None:
    """CaiT's attention stays as it is beside a Swin that is converted."""
    from timm.models.cait import TalkingHeadAttn
    from timm.models.swin_transformer import WindowAttention

    model = nn.ModuleDict(
        {"mixes": TalkingHeadAttn(16, num_heads=2), "swin": WindowAttention(16, 2, window_size=4)}
    ).eval()
    x, plain = torch.randn(2, 9, 16), copy.deepcopy(model["mixes"])
    plan = patch_model(model, force_all=True, backend="sdpa")
    assert {site.name: site.status for site in plan.sites} == {
        "mixes": "unsupported", "swin": "patched"
    }  # fmt: skip
    with torch.no_grad():
        assert torch.equal(model["mixes"](x), plain(x))


def test_nobody_is_told_to_force_what_is_impossible() -> None:
    with pytest.raises(NothingToConvertError, match=r"can be converted.*mixes its heads") as raised:
        require_patched(inspect_model(cait()))
    assert raised.value.hint == ""
    with pytest.raises(NothingToConvertError, match="worth converting") as raised:
        require_patched(inspect_model(aurora()))
    assert raised.value.hint == ""


def test_who_has_short_windows_is_told_to_force_them() -> None:
    from timm.models.cait import TalkingHeadAttn
    from timm.models.swin_transformer import WindowAttention

    short = WindowAttention(16, 2, window_size=2)
    with pytest.raises(NothingToConvertError, match="gains little") as raised:
        require_patched(inspect_model(nn.ModuleList([short])))
    assert raised.value.hint == "--force-all converts them all the same"
    both = nn.ModuleList([short, TalkingHeadAttn(16, num_heads=2)])
    with pytest.raises(NothingToConvertError, match="gains little") as raised:
        require_patched(inspect_model(both))
    assert raised.value.hint == "--force-all converts 1 of them all the same"


def test_blocks_of_monai_without_positions_have_no_recipe() -> None:
    """As all networks of MONAI have them."""
    assert Registry().find(monai_block("SABlock")) is None
    assert Registry().find(monai_block("CrossAttentionBlock", num_heads=4)) is None


def test_a_class_called_like_that_of_the_solver_library_is_none_without_its_parts() -> None:
    path = "models.Transformer_Spatial_Bias.Spatial_Bias_Attention"
    assert Registry().find(stand_in(path, to_q=nn.Linear(16, 16))) is None


def test_what_is_told_to_be_used_instead_is_there() -> None:
    from flashbias_convert.models.pde_transformer import PDETransformer

    (site,) = inspect_model(spatial_bias()).sites
    assert PDETransformer.__module__ in site.reason
    for script in re.findall(r"scripts/\S+\.py", site.reason):
        assert (Path(__file__).parents[2] / script).is_file()


def test_mvit_that_pools_first_raises_in_timm() -> None:
    """Once it does not, it can have a recipe."""
    model = pool_first().eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"[Ss]ize"):
        model(torch.zeros(1, 3, 32, 32))
