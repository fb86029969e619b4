"""One attention of timm's SwinV2: what the original adds, bit for bit where it can be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, unpatch_model
from flashbias_convert import masks as masks_module
from flashbias_convert.recipes.timm_swinv2 import SwinV2WindowAttention
from flashbias_convert.swap import patched_modules
from flashbias_convert.terms import Regions, ScoreBias
from tests.support import assert_parity

from .models import check_model, image, make, patch, shifted_block, swin, window_tokens


def test_the_extracted_bias_is_what_the_original_adds() -> None:
    model, _, attn = shifted_block(pretrained_window_sizes=(6, 6))
    site = inspect_model(model, method="exact").sites[1]
    assert site.bias is not None
    x = window_tokens()
    seen: list[Tensor] = []
    attn.softmax.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        attn(x)
        attn.logit_scale.fill_(-torch.inf)  # leaves the bias alone
        attn(x)
    assert torch.equal(site.bias.select_heads([0, 1]).terms[0].dense(64, 64), seen[1][0])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("arguments", [{}, {"qkv_bias": False}, {"separate": True}])
def test_q_and_k_are_the_originals_bit_for_bit_and_nothing_is_copied(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attn = make(**arguments).bfloat16().layers[0].blocks[0].attn
    x = window_tokens().bfloat16()
    theirs: list[Tensor] = []
    ours: list[Tensor] = []
    right = masks_module.attend_windows

    def recorded(terms: Any, *qkv: Any, **kwargs: Any) -> Tensor:
        ours.extend(qkv[:3])
        return right(terms, *qkv, **kwargs)

    monkeypatch.setattr("flashbias_convert.recipes.timm_swinv2.attend_windows", recorded)
    with torch.no_grad():
        normalize = nn.functional.normalize
        with monkeypatch.context() as context:
            context.setattr(
                nn.functional, "normalize", lambda t, **kw: theirs.append(t) or normalize(t, **kw)
            )
            attn(x)
        patch(attn)
        attn(x)
    assert len(theirs) == 2 and len(ours) == 3
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert len({t.untyped_storage().data_ptr() for t in ours}) == 1


def test_subclasses_are_patched() -> None:
    class Mine(swin.WindowAttention):  # type: ignore[misc, name-defined]
        pass

    model, _, attn = shifted_block()
    attn.__class__ = Mine
    check_model(model, image())
    assert isinstance(attn, SwinV2WindowAttention)
    unpatch_model(model)
    assert type(attn) is Mine


def test_scores_are_bounded_by_scale_and_bias() -> None:
    model = make()
    patch(model, method="svd", energy=0.9, max_attention_error=1.0)
    for attn in patched_modules(model):
        assert isinstance(attn, SwinV2WindowAttention)
        largest = attn.logit_scale.clamp(max=math.log(100)).exp().max()
        dense = ScoreBias(
            tuple(t for t in attn.score_bias.bias.terms if not isinstance(t, Regions)),
            attn.num_heads,
        ).dense(64, 64)
        bound = attn.score_bias.score_bound
        assert bound is not None
        assert largest + dense.abs().max() <= bound <= 1.03 * (largest + dense.abs().max())


def test_a_zero_key_stays_finite_where_the_original_does_not() -> None:
    # padded tokens are zero and keys have no bias; in fp16 the original divides zero by zero
    model = make(img_size=36, window_size=7, depths=(1, 1), qkv_bias=False).half()
    attn = model.layers[0].blocks[0].attn
    x = torch.zeros(4, 49, 32, dtype=torch.float16)
    x[:, :20] = torch.randn(4, 20, 32, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        plain = attn(x)
        patch(model)
        assert attn(x).isfinite().all()
    with pytest.raises(AssertionError, match="plain has values that are not finite"):
        assert_parity(plain, plain, plain.nan_to_num().double())
