"""Tiny models of transformers whose attention function can be chosen by name, and runs of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.recipes.model_parity import randomised

N, VOCABULARY = 20, 97
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16, "decoder_start_token_id": 0, "dropout_rate": 0.1,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = _TEXT | {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
_IMAGE: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 32,
}  # fmt: skip
#: class of the model, class of its configuration, sizes, factors of its weights
_MAKE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", _T5),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        _T5 | {"num_experts": 1},
    ),
    # its encoder's attention is its own, and adds the mask that it gets
    "bigbird_pegasus": (
        "BigBirdPegasusForConditionalGeneration",
        "BigBirdPegasusConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
         "decoder_ffn_dim": 32, "attention_type": "original_full", "pad_token_id": 0},
    ),
    "bert": ("BertModel", "BertConfig", _TEXT),
    "layoutlmv3": (
        "LayoutLMv3Model",
        "LayoutLMv3Config",
        _TEXT | {"visual_embed": False, "coordinate_size": 6, "shape_size": 4},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED | {"attention_dropout": 0.1}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED | {"sliding_window": 6}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GROUPED | {"sliding_window": 6}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _GROUPED | {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "beit": (
        "BeitModel",
        "BeitConfig",
        _IMAGE | {"use_relative_position_bias": True, "layer_scale_init_value": 0.5},
    ),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1],
         "num_heads": [2, 4], "window_size": 4},
    ),
}  # fmt: skip


def make(name: str, implementation: str = "eager") -> Any:
    """The model of this name, always the same weights, in eval mode."""
    kind, config_kind, sizes = _MAKE[name]
    config = getattr(transformers, config_kind)(**sizes)
    config._attn_implementation = implementation
    return randomised(
        getattr(transformers, kind)(config),
        relative_attention_bias=2.0, relative_position_bias=2.0, rel_pos=2.0, shared=1.0,
        lm_head=0.3,
    )  # fmt: skip


def tokens(n: int = N, seed: int = 1) -> Tensor:
    """Token ids, (3, n)."""
    return torch.randint(3, VOCABULARY, (3, n), generator=torch.Generator().manual_seed(seed))


def padding(side: str, n: int = N) -> Tensor:
    """A mask of padding, (3, n), of which the last row has none."""
    mask = torch.ones(3, n, dtype=torch.long)
    mask[0, -7:], mask[1, -3:] = 0, 0
    return mask if side == "right" else mask.flip(-1)


def image(model: Any) -> Tensor:
    """Images in the dtype of a model, (2, 3, 32, 32)."""
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    return pixels.to(next(model.parameters()).dtype)


def _encoded(model: Any, side: str | None) -> Tensor:
    mask = None if side is None else padding(side)
    given = {"input_ids": tokens(), "attention_mask": mask}
    if hasattr(model.config, "max_2d_position_embeddings"):
        corner = torch.arange(N)[:, None].expand(3, N, 2) * 7 % 50
        given["bbox"] = torch.cat([corner, corner + 9], -1)
    if model.config.is_encoder_decoder:
        out: Tensor = model(**given, decoder_input_ids=tokens(9, seed=2)).logits
        return out
    out = model(**given)
    last: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return last if mask is None else last[mask.bool()]  # nobody reads what padding becomes


def _seen(model: Any) -> Tensor:
    out: Tensor = model(image(model)).last_hidden_state
    return out


@dataclass(frozen=True)
class Run:
    """A model by its name, and a call of it."""

    name: str
    call: Callable[[Any], Tensor]


#: the calls that are compared, by their names
RUNS: dict[str, Run] = {
    f"{name}-{side}": Run(name, lambda model, side=side: _encoded(model, side))
    for name in (
        "t5",
        "umt5",
        "switch",
        "bigbird_pegasus",
        "bert",
        "layoutlmv3",
        "llama",
        "mistral",
        "bloom",
    )
    for side in (None, "left", "right")
} | {name: Run(name, _seen) for name in ("beit", "swin")}
