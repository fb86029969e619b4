"""Small language models with ALiBi, their inputs, and what they compute in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert import patch_model
from tests.support import Float64Throughout

HEADS = 6
SIZES: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make(name: str, **changes: Any) -> Any:
    """A model of two layers and six heads (no power of two) in eval mode, whose bias matters."""
    import transformers

    if name == "bloom":
        config = transformers.BloomConfig(
            hidden_size=48, n_layer=2, n_head=HEADS, **SIZES | changes
        )
        make_model = transformers.BloomForCausalLM
    elif name == "mpt":
        sizes = {"d_model": 48, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 64}
        config = transformers.MptConfig(**SIZES | sizes | changes)
        make_model = transformers.MptForCausalLM
    elif name == "gpt2":
        from flashbias_convert.models.alibi_gpt2 import AlibiGPT2Config, AlibiGPT2LMHeadModel

        config = AlibiGPT2Config(
            **SIZES
            | {
                "n_embd": 48,
                "n_layer": 2,
                "n_head": HEADS,
                "attn_pdrop": 0.0,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
            }
            | changes
        )
        make_model = AlibiGPT2LMHeadModel
    else:
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
        style = {"alibi": True, "multi_query": False, "new_decoder_architecture": False}
        config = transformers.FalconConfig(**SIZES | sizes | style | changes)
        make_model = transformers.FalconForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_model(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.15)
    return model


OWNERS = {"bloom": 2, "mpt": 2, "falcon": 2, "gpt2": 1}
NAMES = ("bloom", "mpt", "falcon", "gpt2")


def tokens(batch: int = 3, n: int = 20) -> Tensor:
    return torch.randint(3, 97, (batch, n), generator=torch.Generator().manual_seed(1))


def padding(batch: int = 3, n: int = 20) -> Tensor:
    """Left padding of 7 tokens, of 3, and none."""
    mask = torch.ones(batch, n, dtype=torch.long)
    mask[0, :7] = 0
    mask[1, :3] = 0
    return mask


def patch(model: nn.Module, **options: Any) -> nn.Module:
    plan = patch_model(model, **{"backend": "sdpa", **options})
    assert plan.counts() == {"patched": 2}
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    out: Tensor = model(ids, **kwargs).logits
    return out


def true_logits(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the original computes in float64, with scores and bias that are not rounded to float32.

    Row by row and without the padding: in float64 padding makes the originals give NaN. Zeros
    stand where tokens are padding.
    """
    wide = copy.deepcopy(model).double()
    if hasattr(wide.get_decoder(), "build_alibi_tensor"):  # the slopes of BLOOM are float32
        wide.get_decoder().build_alibi_tensor = exact_bloom(wide.get_decoder())
    real = torch.ones_like(ids) if mask is None else mask
    out = torch.zeros(*ids.shape, 97, dtype=torch.float64)
    for i, kept in enumerate(real.bool()):
        with Float64Throughout():
            row = logits(wide, ids[i : i + 1, kept], attention_mask=real[i : i + 1, kept])
        out[i, kept] = row[0]
    return out


def exact_bloom(decoder: Any) -> Callable[..., Tensor]:
    slopes = decoder.build_alibi_tensor(torch.ones(1, 2), HEADS, torch.float32)[:, 0, 1].double()

    def build(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        places = (mask.cumsum(-1) - 1) * mask
        return (slopes[:, None] * places[:, None, :]).flatten(0, 1)[:, None, :]

    return build
