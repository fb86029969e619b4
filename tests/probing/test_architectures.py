"""The prober finds out, without a recipe, what is known of many architectures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashbias_convert import Probe, SiteProbe, probe_model

from . import architectures as a

#: model -> for each kind of site: a part of its name, kind, details, term, notes
KNOWN: dict[str, tuple[Callable[[], a.Made], list[tuple[str, str, str, str, list[str]]]]] = {
    "timm SwinV2": (
        a.swinv2,
        [
            ("blocks.0.attn", "offset", "2-D offsets, 8 x 8", "relative_table", ["cosine"]),
            ("blocks.1.attn", "offset", "2-D offsets, 8 x 8", "relative_table",
             ["cosine", "a mask of -100 keeps regions apart, in 4 windows"]),
        ],
    ),
    "timm Swin": (
        a.swin,
        [
            ("0.blocks.0.attn", "offset", "2-D offsets, 4 x 4", "relative_table", []),
            ("0.blocks.1.attn", "offset", "2-D offsets, 4 x 4", "relative_table",
             ["a mask of -100 keeps regions apart, in 4 windows"]),
        ],
    ),
    "transformers Swin: bias and mask in one": (
        a.swin_of_transformers,
        [
            ("blocks.1", "offset", "2-D offsets, 4 x 4", "relative_table",
             ["a mask of -100 keeps regions apart, in 4 windows"]),
        ],
    ),
    "transformers Swinv2": (
        a.swinv2_of_transformers,
        [("blocks.1", "offset", "2-D offsets, 4 x 4", "", ["the same mask is added 2 times"])],
    ),
    "timm BEiT": (
        a.beit,
        [("blocks", "offset", "2-D offsets, 4 x 4 behind one special token", "", [])],
    ),
    "timm ViT": (a.vit, [("blocks", "none", "nothing", "", [])]),
    "T5": (
        a.t5,
        [
            ("encoder.block.0", "offset", "1-D offsets", "relative_table", ["scale is 1, not"]),
            ("encoder.block.1", "offset", "1-D offsets", "relative_table",
             ["the same bias as encoder.block.0"]),
            ("decoder.block.0.layer.0", "offset", "1-D offsets", "relative_table", ["causal"]),
            ("EncDecAttention", "constant", "zeros", "", ["scale is 1, not"]),
        ],
    ),
    "MPNet": (a.mpnet, [("layer", "offset", "1-D offsets", "relative_table", [])]),
    "BLOOM": (a.bloom, [("h.", "per key", "evenly spaced: ALiBi", "alibi", ["causal"])]),
    "MPT": (a.mpt, [("blocks", "per key", "evenly spaced: ALiBi", "alibi", ["causal"])]),
    "Falcon": (a.falcon, [("h.", "per key", "evenly spaced: ALiBi", "alibi", ["causal"])]),
    "Falcon, eager": (
        lambda: a.falcon("eager"),
        [("h.", "per key", "evenly spaced: ALiBi", "alibi", ["the same bias is added 2 times"])],
    ),
    "SAM": (
        a.sam,
        [("layers.1", "query-dependent", "the axes of 4 x 4 keys, linear in query", "axial", [])],
    ),
    "SAM, eager": (
        lambda: a.sam("eager"),
        [("layers.1", "query-dependent", "the axes of 4 x 4 keys, linear in query", "axial", [])],
    ),
    "MViTv2 with a class token": (
        a.mvit,
        [("stages.0", "input-dependent", "keys behind one special", "axial", [])],
    ),
    "Pangu": (
        a.pangu,
        [
            ("Block1", "dense", "4 window types", "", ["a mask of -100 keeps regions apart"]),
            ("Layer1", "dense", "2 window types", "", []),
        ],
    ),
    "WavLM": (a.wavlm, [("layers", "gated", "a gate: 1-D offsets", "row_scale", [])]),
    "LiLT: another product, of heads of 6": (
        a.lilt,
        [
            ("self", "input-dependent", "in each call keeps 99 % of the energy", "low_rank", []),
            ("self#2", "input-dependent", "in each call keeps 99 % of the energy", "low_rank", []),
        ],
    ),
    "DeBERTa": (a.deberta, [("layer", "query-dependent", "linear in query and key", "dense", [])]),
}  # fmt: skip
_CACHE: dict[str, Probe] = {}


def probed(name: str) -> Probe:
    if name not in _CACHE:
        _CACHE[name] = probe_model(*KNOWN[name][0]())
    return _CACHE[name]


def sites_of(found: Probe, part: str) -> list[SiteProbe]:
    sites = [site for site in found.sites if part in site.site]
    assert sites, f"no site {part} among {[site.site for site in found.sites]}"
    return sites


@pytest.mark.parametrize("name", KNOWN)
def test_kinds_are_rediscovered(name: str) -> None:
    found = probed(name)
    for part, kind, detail, term, notes in KNOWN[name][1]:
        for site in sites_of(found, part):
            assert site.kind == kind, site
            assert detail in site.detail and term in site.term, site
            assert all(any(note in said for said in site.notes) for note in notes), site
            assert not any("left over" in said for said in site.notes), site


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_not_there_is_not_said(name: str) -> None:
    """Notes that are about a few architectures do not appear with the others."""
    told = {
        "cosine": ("timm SwinV2", "transformers Swinv2"),
        "keeps regions apart": (
            "timm SwinV2", "timm Swin", "transformers Swin: bias and mask in one",
            "transformers Swinv2", "Pangu",
        ),
        "is added 2 times": ("transformers Swinv2", "Falcon, eager"),
        "causal": ("T5", "BLOOM", "MPT", "Falcon", "Falcon, eager"),
        "scale is": ("timm SwinV2", "transformers Swinv2", "T5", "DeBERTa"),
    }  # fmt: skip
    said = [note for site in probed(name).sites for note in site.notes]
    for note, names in told.items():
        assert any(note in one for one in said) == (name in names), (note, said)


def test_recipes_are_named_where_there_are_some() -> None:
    assert {site.recipe for site in probed("timm SwinV2").sites} == {"timm_swinv2"}
    assert {site.recipe for site in probed("BLOOM").sites} == {"transformers_bloom"}
    assert {site.recipe for site in probed("DeBERTa").sites} == {None}  # it is refused


def test_sizes_and_savings() -> None:
    site = probed("T5").sites[0]
    assert (site.heads, site.n, site.m, site.head_dim, site.batch) == (2, 18, 18, 8, 3)
    assert site.scale == 1.0 and not site.causal
    assert site.dense_bytes == 2 * 18 * 18 * 4
    bloom = probed("BLOOM").sites[0]
    assert bloom.causal and bloom.term_bytes == 4 * 4  # a slope per head
    assert bloom.dense_bytes == 4 * 18 * 18 * 4
    sam = sites_of(probed("SAM"), "layers.1")[0]
    assert sam.term_bytes == 6 * 2 * 16 * (4 + 4) * 4
    assert sam.dense_bytes == 6 * 2 * 16 * 16 * 4


def test_a_product_of_short_heads_has_their_rank() -> None:
    """Layout heads of LiLT are a quarter as long as those of the text: 6 columns are exact."""
    model, inputs = a.lilt()
    found = probe_model(model, inputs, energy=1 - 1e-10)  # rounding of fp32 has less
    assert [site.ranks for site in found.sites] == [(6, 6), (6, 6)]
