"""Logits of converted ALiBi models beside the originals, by length, dtype, padding and cache.

python scripts/check_alibi_lengths.py [--lengths N ...] [--output scripts/results/alibi_lengths.csv]

Random weights, a GPU. The truth is the original in float64 with a bias that is not rounded; both
models may be off by their rounding. `memory` is the peak of one forward pass, beyond the weights.
Exits with 1 if a converted model is more than twice as far off as its original, plus one ulp.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert import patch_model, unpatch_model

ROOT = Path(__file__).resolve().parent.parent
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAST = 8  # positions whose logits are compared where a cache is used
VOCABULARY = 512


def bloom(n: int) -> Any:
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=160, n_layer=2, n_head=5, seq_length=n
    )
    return transformers.BloomForCausalLM(config)


def mpt(n: int) -> Any:
    config = transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=160, n_layers=2, n_heads=5, max_seq_len=n
    )
    return transformers.MptForCausalLM(config)


def falcon(n: int) -> Any:
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=160, num_hidden_layers=2, num_attention_heads=5,
        alibi=True, multi_query=False, new_decoder_architecture=False, max_position_embeddings=n,
    )  # fmt: skip
    return transformers.FalconForCausalLM(config)


def alibi_gpt2(n: int) -> Any:
    from flashbias_convert.models.alibi_gpt2 import AlibiGPT2Config, AlibiGPT2LMHeadModel

    config = AlibiGPT2Config(vocab_size=VOCABULARY, n_embd=160, n_layer=2, n_head=5, n_positions=n)
    return AlibiGPT2LMHeadModel(config)


MODELS: dict[str, Callable[[int], Any]] = {
    "bloom": bloom,
    "mpt": mpt,
    "falcon": falcon,
    "alibi_gpt2": alibi_gpt2,
}


def make(name: str, n: int) -> Any:
    """A model in float32 on the card, with weights at which attention matters."""
    torch.manual_seed(0)
    model = MODELS[name](n)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.1)
    return model.eval().cuda()


def exact_bloom(decoder: Any) -> Callable[..., Tensor]:
    """BLOOM's bias in float64: its own is a product of float32 numbers."""
    two = torch.ones(1, 2, device="cuda")
    slopes = decoder.build_alibi_tensor(two, decoder.num_heads, torch.float32)[:, 0, 1].double()

    def build(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        places = (mask.cumsum(-1) - 1) * mask
        return (slopes[:, None] * places[:, None, :]).flatten(0, 1)[:, None, :]

    return build


def exact_mpt(decoder: Any) -> Callable[..., Tensor]:
    """MPT's bias in float64."""
    two = decoder.build_mpt_alibi_tensor(decoder.num_heads, 2, device="cuda")
    slopes = -two[:, 0, 0].double()

    def build(heads: int, length: int, *_: Any, device: Any = None, **__: Any) -> Tensor:
        return slopes[:, None, None] * torch.arange(1 - length, 1, device=device)

    return build


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor, cached: bool) -> Tensor:
    """Logits of every position; with a cache, of the last few, one token at a time."""
    if not cached:
        whole: Tensor = model(ids, attention_mask=mask, use_cache=False).logits
        return whole
    n, parts = ids.shape[1], []
    cache = transformers.DynamicCache()
    for start, stop in [(0, n - LAST), *((i, i + 1) for i in range(n - LAST, n))]:
        out = model(
            ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        parts.append(out.logits)
    return torch.cat(parts[1:], 1)


@contextmanager
def unrounded() -> Iterator[None]:
    """The originals round their scores to float32 before the softmax, in float64, too."""
    softmax, to_float = F.softmax, Tensor.float

    def wide(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim, dtype=torch.float64 if x.dtype == torch.float64 else dtype)

    with (
        mock.patch.object(F, "softmax", wide),
        mock.patch.object(
            Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)
        ),
    ):
        yield


def truth_of(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits in float64, row by row without its padding; zeros at the padding."""
    wide = copy.deepcopy(model).double()
    decoder = wide.get_decoder()
    if type(decoder).__name__ == "BloomModel":
        decoder.build_alibi_tensor = exact_bloom(decoder)
    if type(decoder).__name__ == "MptModel":
        decoder.build_mpt_alibi_tensor = exact_mpt(decoder)
    out = torch.zeros(*ids.shape, VOCABULARY, dtype=torch.float64, device=ids.device)
    for i, kept in enumerate(mask.bool()):
        row = ids[i : i + 1, kept]
        with unrounded():
            out[i, kept] = logits(wide, row, torch.ones_like(row), cached=False)[0]
    return out


def peak(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What a call returns, and MiB that it needed on top of what was there."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    return out, (torch.cuda.max_memory_allocated() - before) / 2**20


def rows(name: str, n: int) -> Iterator[dict[str, Any]]:
    """One row per dtype, padding and use of the cache."""
    model = make(name, n)
    ids = torch.randint(VOCABULARY, (2, n), device="cuda")
    for padded in (False, True):
        mask = torch.ones_like(ids)
        mask[0, : n // 3] = not padded
        truth = truth_of(model, ids, mask)
        for dtype in DTYPES:
            made = copy.deepcopy(model).to(dtype)
            for cached in (False, True):
                true = truth[:, -LAST:] if cached else truth
                real = mask[:, -LAST:].bool() if cached else mask.bool()
                plain, plain_mib = peak(partial(logits, made, ids, mask, cached))
                patch_model(made)
                ours, ours_mib = peak(partial(logits, made, ids, mask, cached))
                unpatch_model(made)
                errors = [float((x.double() - true)[real].abs().max()) for x in (plain, ours)]
                ulp = torch.finfo(dtype).eps * float(true.abs().max())
                yield {
                    "model": name, "n": n, "dtype": str(dtype).removeprefix("torch."),
                    "padded": padded, "cached": cached,
                    "original_error": f"{errors[0]:.3g}", "converted_error": f"{errors[1]:.3g}",
                    "passes": errors[1] <= 2 * errors[0] + ulp,
                    "original_mib": f"{plain_mib:.1f}", "converted_mib": f"{ours_mib:.1f}",
                    "card": torch.cuda.get_device_name(),
                }  # fmt: skip


def main() -> int:
    """Print and write every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192, 16384])
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/alibi_lengths.csv")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    with options.output.open("w", newline="") as file:
        writer = None
        for name in options.models:
            for n in options.lengths:
                for row in rows(name, n):
                    writer = writer or csv.DictWriter(file, row)
                    if file.tell() == 0:
                        writer.writeheader()
                    writer.writerow(row)
                    file.flush()
                    failed += not row["passes"]
                    print(*row.values(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
