"""The page beside the weights of the ALiBi GPT-2 that `train_alibi_gpt2.py` trains."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

EXAMPLE = """```python
import torch

from flashbias_convert.models.alibi_gpt2 import AlibiGPT2LMHeadModel

model = AlibiGPT2LMHeadModel.from_pretrained("examples/alibi_gpt2_shakespeare", dtype=torch.float32)
tokens = torch.tensor([list(b"ROMEO:")])
written = model.eval().generate(tokens, max_new_tokens=200, do_sample=True)
print(bytes(written[0].tolist()).decode())
```"""


def page(record: dict[str, Any]) -> str:
    """Markdown from the content of ``training.json``; every number comes from there."""
    hyper = record["hyperparameters"]
    paragraphs = [
        f"# GPT-2 with ALiBi on `{record['text']}`",
        _wrapped(
            "A small byte-level language model, trained from scratch, as real input for "
            "`flashbias-convert`: it knows the order of its tokens from linear biases alone, and "
            f"was trained with windows of {hyper['length']} bytes, so that longer ones show what "
            "the biases are for."
        ),
        "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in _rows(record))]),
        _wrapped(
            f"The held-out text also chose the weights: of {len(record['losses'])} evaluations, "
            f"that of step {record['best_step']:,} was the best. The model was made by"
        ),
        f"```\npython scripts/train_alibi_gpt2.py TEXT_FILE {record['arguments']}\n```",
        _wrapped(
            f"AdamW with bf16 autocast, warm-up and a cosine, dropout {hyper['dropout']}. "
            + _about_the_steps(record)
            + "`training.json` has every setting and number; the perplexities there come from the "
            "same script, which reads the saved file back for them."
        ),
        EXAMPLE,
        "Licence of the weights: MIT.",
    ]
    return "\n\n".join(paragraphs) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _rows(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the table says."""
    model, hyper = record["model"], record["hyperparameters"]
    yield (
        "architecture",
        "`flashbias_convert.models.alibi_gpt2.AlibiGPT2LMHeadModel`: GPT-2 with ALiBi and without "
        f"a position table; {model['n_layer']} layers, {model['n_embd']} channels, "
        f"{model['n_head']} heads, feed-forward width {model['n_inner']}, bytes as tokens",
    )
    yield "parameters", f"{record['parameters']:,} (fp16, {record['file_bytes'] / 1e6:.1f} MB)"
    yield (
        "text",
        f"the first nine tenths of `{record['text']}`, {record['train_bytes']:,} bytes; the other "
        f"{record['held_out_bytes']:,} are held out",
    )
    yield (
        "perplexity per byte",
        f"**{record['perplexity']:.3f}** on the held-out text in windows of {hyper['length']}, in "
        f"fp32 with the weights of the file; {record['train_perplexity']:.3f} on the text it was "
        "trained on",
    )
    yield "without the bias", f"{record['perplexity_without_bias']:.3f}"
    yield (
        "training",
        f"seed {record['seed']}, {record['steps']:,} steps of {hyper['batch']} windows, "
        f"{record['train_seconds']:.0f} s after {record['compile_seconds']:.0f} s of compilation "
        f"on one {record['card']}; torch {record['torch']}, transformers {record['transformers']}",
    )


def _about_the_steps(record: dict[str, Any]) -> str:
    if record["fixed_steps"]:
        return ""
    return (
        "The number of steps was fitted to the seconds, so another card may train for another "
        f"number; `--steps {record['steps']}` gives this schedule. "
    )
