"""A GOT-OCR 2 with random weights and two layers of each kind, and what it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: side of its images
IMAGE_SIZE = 32
#: a text has four of them, for the patches of the image
IMAGE_TOKEN = 95


def config() -> Any:
    """Of vision with biased attention, and of a text that transformers can split by its plan."""
    import transformers

    vision = {
        "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": IMAGE_SIZE, "patch_size": 4, "mlp_dim": 32, "window_size": 3,
        "global_attn_indexes": [1],
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    }  # fmt: skip
    return transformers.GotOcr2Config(
        vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, pad_token_id=0
    )


def make() -> Any:
    """The model, the same on every process; its bias matters."""
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.GotOcr2ForConditionalGeneration(config()).eval()
    for key, parameter in model.named_parameters():
        if "rel_pos" in key:  # zero: the bias would do nothing
            parameter.data.normal_()
    return model


def text() -> Tensor:
    """Tokens (1, 12) of a text with one image; the same on every process."""
    ids = torch.randint(1, 90, (1, 12), generator=torch.Generator().manual_seed(1))
    ids[0, 2:6] = IMAGE_TOKEN
    return ids
