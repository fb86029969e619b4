"""ESMFold's blocks and the whole model, patched, against the originals, with random weights."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import (
    StaleTermsError,
    UsageError,
    apply_plan,
    factors_once,
    fit_sites,
    inspect_model,
    patch_model,
)
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.decompose.pair_forms import PairSite, forms, forms_in_words
from flashbias_convert.decompose.pair_times import Pairs
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.plan import SitePlan
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

transformers = pytest.importorskip("transformers")

N, PAIR, SINGLE = 10, 8, 12
BIAS = (
    "tri_att_start.linear.weight",
    "tri_att_end.linear.weight",
    "pair_to_sequence.linear.weight",
)
#: what makes biases that matter
LARGE = {"tri_att_start.linear": 2.0, "tri_att_end.linear": 2.0, "pair_to_sequence.linear": 2.0}


def trunk() -> Any:
    esm = transformers.models.esm.configuration_esm
    structure = {
        "sequence_dim": SINGLE, "pairwise_dim": PAIR, "ipa_dim": 4, "resnet_dim": 8,
        "num_heads_ipa": 2, "num_qk_points": 2, "num_v_points": 2, "num_blocks": 1,
        "num_transition_layers": 1, "num_resnet_blocks": 1,
    }  # fmt: skip
    sizes = {
        "num_blocks": 1, "sequence_state_dim": SINGLE, "pairwise_state_dim": PAIR,
        "sequence_head_width": 6, "pairwise_head_width": 4, "position_bins": 4,
        "max_recycles": 1, "structure_module": structure,
    }  # fmt: skip
    return esm.TrunkConfig(**sizes)


def block() -> Any:
    from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

    return randomised(EsmFoldTriangularSelfAttentionBlock(trunk()), std=0.3, **LARGE)


def states(model: Any) -> tuple[Tensor, Tensor]:
    """The same numbers in each dtype."""
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(2, N, SINGLE, generator=generator)
    z = torch.randn(2, N, N, PAIR, generator=generator)
    dtype = next(model.parameters()).dtype
    return s.bfloat16().half().to(dtype), z.bfloat16().half().to(dtype)


def padding() -> Tensor:
    mask = torch.ones(2, N, dtype=torch.long)
    mask[0, -3:] = 0
    return mask


def block_case(padded: bool) -> Case:
    def run(model: Any) -> Tensor:
        mask = padding() if padded else None
        s, z = model(*states(model), mask=mask, chunk_size=4 if padded else None)
        real = padding().bool() if padded else torch.ones(2, N, dtype=torch.bool)
        pairs = real[:, :, None] & real[:, None]  # rows of padding are nobody's
        return torch.cat([s[real].flatten(), z[pairs].flatten()])

    return Case(block, run, BIAS, {"patched": 3})


CASES = {"all": block_case(padded=False), "padded": block_case(padded=True)}


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    if name == "padded" and dtype == torch.float16:
        pytest.skip("a mask of -1e9 is infinite in fp16, and the original returns NaN")
    parity.check_values(CASES[name], dtype, backend)


def test_the_plan_says_which_form_and_why() -> None:
    """For the length that is asked for: up to which rank factors would cost less."""
    for tokens in (384, 2048):
        for site in inspect_model(block(), tokens=tokens).sites:
            pairs = Pairs(PAIR, "linear", None)
            if site.name == "seq_attention":
                pairs = Pairs(site.heads, "laying out")
            pair_site = PairSite(site.heads, site.head_dim, pairs)
            words = forms_in_words(tokens, tokens, pair_site)
            assert site.reason == f"dense in each call: {words}"
            assert f"at {tokens} tokens; factors cost less" in words
            assert site.forms == forms(tokens, tokens, pair_site)
            data = json.loads(json.dumps(site.to_json()))
            assert [form["form"] for form in data["forms"]] == [
                "dense", "factors_once", "factor_network",
            ]  # fmt: skip
            assert SitePlan.from_json(data) == site
            del data["forms"]  # a plan that was written before there were any
            assert SitePlan.from_json(data) == dataclasses.replace(site, forms=())


def test_comes_and_goes() -> None:
    parity.check_comes_and_goes(CASES["padded"])


def test_other_weights_bring_their_bias() -> None:
    parity.check_follows_weights(CASES["padded"])


def test_training_is_the_original() -> None:
    parity.check_training(CASES["padded"])


def test_masks_and_a_shared_bias_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, Any]] = []
    forward = ScoreBiasModule.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((kwargs["key_mask"], kwargs["built"]["dense"]["bias"]))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ScoreBiasModule, "forward", counted)
    model = block()
    CASES["padded"].patched(model)
    CASES["padded"].output(model)
    assert len(calls) == 3 and all(not mask.all() for mask, _ in calls)
    shapes = [tuple(bias.shape) for _, bias in calls]
    assert shapes == [(2, 2, N, N), (2, 1, 2, N, N), (2, 1, 2, N, N)]  # no copy for each row


# -- the whole model -----------------------------------------------------------------------


def model() -> Any:
    config = transformers.EsmConfig(
        vocab_size=33, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, is_folding_model=True, token_dropout=True, mask_token_id=32,
        pad_token_id=1, position_embedding_type="rotary",
        esmfold_config={
            "trunk": trunk().to_dict(), "fp16_esm": False, "lddt_head_hid_dim": 8,
        },
    )  # fmt: skip
    return randomised(transformers.EsmForProteinFolding(config), std=0.3, **LARGE)


def run_model(model: Any) -> Tensor:
    residues = torch.randint(0, 20, (2, N), generator=torch.Generator().manual_seed(2))
    out = model(residues, attention_mask=padding(), num_recycles=1)
    real = padding().bool()
    return torch.cat([out.s_s[real].flatten(), out.lm_logits[real].flatten()])


MODEL = Case(model, run_model, BIAS, {"patched": 3})


def test_the_whole_model_in_fp32() -> None:
    """Two passes through the trunk, and a converted folder that loads."""
    original = MODEL.make()
    plain = MODEL.output(original)
    MODEL.patched(original)
    out = MODEL.output(original)
    without = MODEL.output(parity.without_bias(MODEL, original))
    assert (without - plain).abs().max() > 1e-2 * plain.abs().max()
    assert (out - plain).abs().max() < 1e-4 * plain.abs().max()


def test_a_folder_converts_and_loads(tmp_path: Path) -> None:
    parity.check_folder(MODEL, tmp_path)


# -- factors -------------------------------------------------------------------------------


def test_sites_can_have_networks_instead() -> None:
    """What is fitted takes the place of the bias, and belongs to the weights that it was."""
    original = block()
    s, z = states(original)
    inputs = [{"sequence_state": s, "pairwise_state": z, "mask": padding()}] * 2
    anything = FitOptions(hidden=8, steps=10, check_every=5, energy=None, max_attention_error=1.0)
    plan = fit_sites(original, inputs, rank=3, options=anything, from_tokens=1)
    assert [site.status for site in plan.sites] == ["patched"] * 3
    apply_plan(original, plan, backend="sdpa")
    for name in ("seq_attention", "tri_att_start", "tri_att_end"):
        spec = original.get_submodule(name).score_bias.spec()
        assert "builders" not in spec and len(spec["builder_modules"]) == 1
    fitted, plain = (CASES["padded"].output(each) for each in (original, block()))
    assert fitted.isfinite().all() and (fitted - plain).abs().max() > 1e-3 * plain.abs().max()
    with torch.no_grad():
        original.tri_att_end.linear.weight.mul_(2)
    with pytest.raises(StaleTermsError):
        CASES["padded"].output(original)


def test_a_site_that_is_left_out_is_not_fitted() -> None:
    original = block()
    s, z = states(original)
    options = FitOptions(hidden=8, steps=5, check_every=5, energy=None, max_attention_error=None)
    plan = fit_sites(original, {"sequence_state": s, "pairwise_state": z}, rank=3, options=options,
                     include=["tri_att_end"], from_tokens=1)  # fmt: skip
    status = {site.name: (site.status, site.reason) for site in plan.sites}
    assert status["seq_attention"] == ("left alone", "not among the included sites")
    assert "factor networks of rank 3" in status["tri_att_end"][1]


@pytest.mark.usefixtures("free_factors")
def test_factors_once_serve_the_same_pairs_only() -> None:
    original = block()
    with torch.no_grad():  # a bias of rank 1 for the first head, and of no use for the second
        original.tri_att_start.linear.weight[1] = 0
    patch_model(original, backend="sdpa")
    site = original.tri_att_start
    z = states(original)[1]
    with torch.no_grad(), factors_once(original, include=["tri_att_start"], rank=N) as memories:
        first = site(z)
        assert memories[0].served == 0 and not memories[0].decisions
        assert torch.allclose(site(z.view(z.shape)), first, atol=1e-5)
        assert [d.term for d in memories[0].decisions] == ["low_rank", "none"]
        before = site(z)
        assert memories[0].served == 1
        z[:, 0, :, 0] += 1.0  # written to
        moved = site(z)
        assert memories[0].served == 1 and not torch.allclose(moved, before, atol=1e-2)
        site.linear.weight.mul_(-1)
        turned = site(z)
        assert memories[0].served == 1
    assert site.score_bias.pair_memory is None
    with torch.no_grad():
        assert torch.equal(site(z), turned)
    with pytest.raises(UsageError, match="patch_model"), factors_once(copy.deepcopy(block())):
        pass
