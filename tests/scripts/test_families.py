"""Which models the scripts measure, and that they are what they are said to be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import inspect_model
from flashbias_convert.patched_attention import PatchedAttention

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "paper")]

import bench_models  # noqa: E402
import supported_table  # noqa: E402
from whole_models import (  # noqa: E402
    documents,
    families,
    parts,
    repositories,
    small_tables,
    vision,
)  # fmt: skip
from whole_models.case import FORCED, FUSED, OURS, converted  # noqa: E402
from whole_models.parts import Sizes  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_model_has_a_name_and_ours() -> None:
    for tiny in (False, True):  # nothing is built
        for name, case in bench_models.all_cases(tiny).items():
            assert name == name.lower() or name.startswith("family-")
            assert "original" in case.variants() and "exact" in case.variants()


def test_only_truncated_biases_make_a_conversion_approximate() -> None:
    case = vision.cases(True)["swinv2-b"]
    for way, expected in (("original", False), ("sdpa", False), ("exact", False)):
        assert case.prepare(way, CPU, torch.float32).approximate is expected
    cut = case.build(CPU).eval()
    converted(cut, "ours", method="svd", energy=0.9, force=True)
    assert cut.flashbias_approximate is True


def test_timms_switch_is_measured_where_it_changes_something() -> None:
    """Of the models of timm: which are built otherwise with it."""
    from timm.layers import set_fused_attn, use_fused_attn

    def fused(case: Any) -> list[bool]:
        with torch.no_grad():
            model = case.build(torch.device("cpu"))
        return [m.fused_attn for m in model.modules() if hasattr(m, "fused_attn")]

    assert use_fused_attn() and not use_fused_attn(experimental=True)
    for case in families.cases(True).values():
        if not case.name.startswith("timm_"):
            continue
        usual = fused(case)
        set_fused_attn(experimental=True)
        try:
            changed = fused(case) != usual
        finally:
            set_fused_attn()
        assert changed == (FUSED in case.ways), case.name


def test_a_switch_that_changes_nothing_is_no_variant() -> None:
    with pytest.raises(RuntimeError, match="not fused already"):
        parts.with_fused_attention(torch.nn.Linear(2, 2))


def test_efficientformer_is_converted_beside_its_bias_in_torchs_attention() -> None:
    case = small_tables.cases(True)["efficientformer"]
    with torch.no_grad():
        ready = {way: case.prepare(way, CPU, torch.float32) for way in case.ways}
        plain, *others = (p.model(*p.args, **p.kwargs) for p in ready.values())
        for other in others:
            torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-5)
        model = ready["exact"].model
        sites = [m for m in model.modules() if isinstance(m, PatchedAttention)]
        assert len(sites) == len(inspect_model(case.build(CPU)).patched) > 0
        for site in sites:  # and their bias matters
            for name, tensor in site.score_bias.named_buffers():
                if tensor.is_floating_point() and "bound" not in name:
                    tensor.zero_()
        assert not torch.allclose(model(*ready["exact"].args), plain, rtol=1e-2)


LIVELY = ["timm_levit, 384", "transformers_levit, as 384", "timm_efficientvit, M5, 3 blocks",
          "timm_efficientformer, L3, 8 blocks", "timm_efficientformer_v2, L, 8 blocks"]  # fmt: skip


@pytest.mark.parametrize("name", LIVELY)
def test_small_networks_of_the_families_feel_their_bias(name: str) -> None:
    """Fresh weights would hide it: the last norm of an attention begins at zero."""
    case = families.cases(True)[f"family-{name}"]

    def output(ready: Any) -> Tensor:
        out = ready.model(*ready.args, **ready.kwargs)
        return out if isinstance(out, Tensor) else out[0]

    with torch.no_grad():
        plain, exact = (case.prepare(way, CPU, torch.float32) for way in ("original", "exact"))
        right = output(plain)
        torch.testing.assert_close(output(exact), right, rtol=1e-4, atol=1e-5)
        bare = case.prepare("original", CPU, torch.float32)
        for parameter_name, parameter in bare.model.named_parameters():
            if "attention_biases" in parameter_name:
                parameter.zero_()
        assert not torch.allclose(output(bare), right, rtol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("name", LIVELY)
def test_networks_of_full_size_keep_the_size_of_what_goes_through(name: str) -> None:
    """Else rounding, and errors beside it, mean nothing, and scores overflow."""
    case = families.cases()[f"family-{name}"]
    plain, half = (
        case.prepare("original", CPU, dtype, weights=torch.bfloat16, batch=1)
        for dtype in (torch.float32, torch.bfloat16)
    )
    right, rounded = (r.model(*r.args, **r.kwargs) for r in (plain, half))
    if not isinstance(right, Tensor):
        right, rounded = right[0], rounded[0]
    size = float(right.square().mean().sqrt())
    assert 0.3 < size < 10
    assert float((rounded - right).square().mean().sqrt()) < 0.05 * size


WRITTEN = [*documents.parts(Sizes(tiny=True)), *repositories.parts(Sizes(tiny=True))]


@pytest.mark.parametrize("name", WRITTEN)
def test_models_that_are_written_here_are_converted_exactly(name: str) -> None:
    """Their recipes know them for what they are, all of their sites."""
    case = families.cases(True)[f"family-{name}"]
    with torch.no_grad():
        ready = [case.prepare(way, CPU, torch.float32) for way in ("original", "exact")]
        plain, exact = (p.model(*p.args, **p.kwargs) for p in ready)
    torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
    before = len([m for m in ready[0].model.modules() if type(m).__name__ in ATTENTIONS])
    after = len([m for m in ready[1].model.modules() if isinstance(m, PatchedAttention)])
    assert after == before > 0


ATTENTIONS = {
    "LayoutLMv2SelfAttention", "PPDocLayoutV2ReadingOrderSelfAttention", "WindowAttention",
    "Attention", "ALiBiMultiHeadAttention", "JinaBertSelfAttention", "BertUnpadSelfAttention",
    "MultiheadAttention", "OCAB",
}  # fmt: skip


def test_what_a_plan_leaves_alone_is_measured_all_the_same() -> None:
    """And said to be that: such a row counts for no gain of a recipe."""
    assert f"{OURS}-compiled" == supported_table.OURS
    found = {name: case for name, case in families.cases().items() if FORCED in case.ways}
    assert found and all(parts.LEFT_ALONE in name for name in found)
    for case in found.values():
        assert OURS not in case.ways
        with torch.no_grad():
            model = case.build(CPU)
        assert not inspect_model(model).patched
        forced = case.prepare(FORCED, CPU, torch.float32).model
        assert any(isinstance(m, PatchedAttention) for m in forced.modules())
