"""ALiBi GPT-2, BLOOM, MPT and Falcon, patched, against the originals, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashbias_convert import patch_model
from tests.support import assert_parity

from .models import logits, make, padding, patch, tokens, true_logits

pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_logits(name: str, dtype: torch.dtype, padded: bool, backend: str) -> None:
    model, ids = make(name).to(dtype), tokens()
    mask = padding() if padded else torch.ones_like(ids)
    real = mask.bool()
    truth = true_logits(model, ids, mask)
    plain = logits(model, ids, attention_mask=mask)
    patch(model, backend=backend)
    found = logits(model, ids, attention_mask=mask)
    assert_parity(found[real], plain[real], truth[real])
    if not padded:
        assert_parity(logits(model, ids), plain, truth)
        return
    # the last token of each row sees what it sees without the padding
    alone = [logits(model, ids[i : i + 1, kept])[0, -1] for i, kept in enumerate(real)]
    off = (found[:, -1] - torch.stack(alone)).abs().max()
    assert off <= 8 * torch.finfo(dtype).eps * found.abs().max()


def test_padding_on_the_right_and_in_between(name: str) -> None:
    model, ids, mask = make(name), tokens(), torch.ones(3, 20, dtype=torch.long)
    mask[0, 12:], mask[1, 5:8], mask[1, 0] = 0, 0, 0
    real = mask.bool()
    truth, plain = true_logits(model, ids, mask), logits(model, ids, attention_mask=mask)
    found = logits(patch(model), ids, attention_mask=mask)
    torch.testing.assert_close(found[real], plain[real], rtol=1e-4, atol=1e-5)
    if name in ("mpt", "falcon"):  # they count the gap, which the truth leaves out
        real[1] = False
    assert_parity(found[real], plain[real], truth[real])


def test_a_row_of_padding_alone_harms_nobody(name: str) -> None:
    model, ids, mask = patch(make(name)), tokens(), padding()
    alone = logits(model, ids[1:], attention_mask=mask[1:])
    mask[0] = 0
    together = logits(model, ids, attention_mask=mask)
    assert together.isfinite().all()
    real = mask[1:].bool()
    torch.testing.assert_close(together[1:][real], alone[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 65, 700])
def test_lengths(name: str, n: int) -> None:
    """Beyond MPT's table, too: there the original stops."""
    model, ids = make(name, **({"max_seq_len": 700} if name == "mpt" else {})), tokens(1, n)
    truth, plain = true_logits(model, ids), logits(model, ids)
    if name == "mpt":
        model = make(name, max_seq_len=8)
        if n > 8:
            with pytest.raises(RuntimeError):
                logits(model, ids)
    patch(model)
    assert_parity(logits(model, ids), plain, truth)


@pytest.mark.parametrize(
    "changes",
    [
        {"multi_query": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 6},
    ],
)
def test_key_heads_of_falcon(changes: dict[str, Any]) -> None:
    model, ids, mask = make("falcon", **changes), tokens(), padding()
    truth = true_logits(model, ids, mask)
    plain = logits(model, ids, attention_mask=mask)
    patch(model)
    real = mask.bool()
    assert_parity(logits(model, ids, attention_mask=mask)[real], plain[real], truth[real])


def test_falcon_adds_its_bias_once() -> None:
    """Its eager attention adds it twice, to the mask and to the scores."""
    once, twice, ids = make("falcon"), make("falcon"), tokens()
    twice.config._attn_implementation = "eager"
    plain = logits(once, ids)
    assert (logits(twice, ids) - plain).abs().max() > 1e-3
    plan = patch_model(twice, backend="sdpa")
    assert "once" in plan.sites[0].warnings[0]
    assert_parity(logits(twice, ids), plain, true_logits(once, ids))


def test_clipped_projections_and_softmax_scale_of_mpt() -> None:
    model, ids = make("mpt", attn_config={"clip_qkv": 0.3, "softmax_scale": 0.5}), tokens()
    truth, plain = true_logits(model, ids), logits(model, ids)
    assert (plain - logits(make("mpt"), ids)).abs().max() > 0.1
    patch(model)
    assert_parity(logits(model, ids), plain, truth)


def test_residual_after_the_norm_of_bloom() -> None:
    model, ids = make("bloom", apply_residual_connection_post_layernorm=True), tokens()
    truth, plain = true_logits(model, ids), logits(model, ids)
    patch(model)
    assert_parity(logits(model, ids), plain, truth)
