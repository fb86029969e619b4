"""Language models with ALiBi: what the fused path cannot do runs the original."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.swap import patched_modules

from .models import logits, make, patch, tokens

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_attention_weights_come_from_the_original(name: str) -> None:
    model, ids = make(name), tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(ids, output_attentions=True)
        out = patch(model)(ids, output_attentions=True)
    assert torch.equal(out.logits, plain.logits)
    assert all(torch.equal(a, b) for a, b in zip(out.attentions, plain.attentions, strict=True))


def test_a_mask_of_your_own_is_used_as_it_is() -> None:
    model, ids = make("mpt"), tokens()
    hidden = torch.rand(3, 1, 20, 20, generator=torch.Generator().manual_seed(2)) < 0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    plain = logits(model, ids, attention_mask=mask)
    assert torch.equal(logits(patch(model), ids, attention_mask=mask), plain)


def test_training_is_the_original(name: str) -> None:
    model, ids = make(name), tokens()
    grads = []
    for change in (lambda m: m, patch):
        change(model).train().zero_grad()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.eval()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_with_gradient_checkpoints_is_the_original(name: str, reentrant: bool) -> None:
    model, ids = patch(make(name)).train(), tokens()
    grads = []
    for checkpoints in (False, True):
        model.zero_grad()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert model.is_gradient_checkpointing
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_block_in_training_mode_gets_what_its_original_needs(name: str) -> None:
    model, ids = make(name), tokens()
    plain = logits(model, ids)
    patched_modules(patch(model))[1].train()
    assert torch.equal(logits(model, ids), plain)  # no dropout is configured
