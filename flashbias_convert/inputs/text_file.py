"""A text file, as tokens of a folder's tokenizer, or byte by byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .batch import Batch, Inputs
from .random_inputs import sequence_length, vocabulary_size

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt")
#: bytes of a text that are looked at; more says nothing more about a conversion
_MOST_BYTES = 2**25


def text_inputs(
    model: nn.Module,
    file: Path,
    samples: int,
    batch: int,
    seed: int = 0,
    tokens: int | None = None,
    tokenizer: Path | None = None,
) -> Inputs:
    """Random pieces of a text; the tokens are their own labels, for perplexity.

    Args:
        model: one that takes tokens.
        file: UTF-8 text.
        samples: how many pieces at most.
        batch: how many at once.
        seed: which.
        tokens: length of a piece; default 128, or less where the model ends before.
        tokenizer: a folder; without tokenizer files in it, bytes are tokens.

    Raises:
        UsageError: a model that takes no tokens, a text that is too short, a tokenizer that cannot
            be used, or bytes for a model that knows fewer than 256 tokens.
    """
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        raise UsageError(f"{type(model).__name__} does not say that it takes tokens")
    length = sequence_length(model, tokens)
    ids, notes = _ids(file, tokenizer, vocabulary)
    starts = _starts(len(ids), length, samples, seed, file)
    name = getattr(model, "main_input_name", None)
    twice = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def batches() -> Iterator[Batch]:
        for at in range(0, len(starts), batch):
            some = torch.stack([ids[s : s + length] for s in starts[at : at + batch]])
            yield _batch(some, name, twice)

    source = f"{len(starts)} pieces of {length} tokens of {file} (seed {seed})"
    # an encoder has read the answer
    return Inputs(batches(), source, notes, None if twice else "next token")


def _batch(ids: Tensor, name: str | None, twice: bool) -> Batch:
    if name is None:
        return Batch(args=(ids,), size=len(ids), labels=ids)
    kwargs = {name: ids, **({"decoder_input_ids": ids} if twice else {})}
    return Batch(kwargs=kwargs, size=len(ids), labels=ids)


def _starts(total: int, length: int, samples: int, seed: int, file: Path) -> list[int]:
    """Where pieces begin; they do not overlap."""
    whole = total // length
    if not whole:
        raise UsageError(f"{file} holds {total} tokens, one piece needs {length}", "see --tokens")
    chosen = random.Random(seed).sample(range(whole), min(samples, whole))
    return [piece * length for piece in chosen]


def _ids(file: Path, tokenizer: Path | None, vocabulary: int) -> tuple[Tensor, tuple[str, ...]]:
    with file.open("rb") as opened:
        content = opened.read(_MOST_BYTES)
    found = tokenizer is not None and any((tokenizer / n).is_file() for n in _TOKENIZER_FILES)
    if found:
        assert tokenizer is not None
        ids = _tokenize(content.decode("utf-8", errors="replace"), tokenizer)
        if len(ids) and int(ids.max()) >= vocabulary:
            raise UsageError(f"the tokenizer in {tokenizer} knows more tokens than the model")
        return ids, ()
    if vocabulary < 256:
        raise UsageError(
            f"the model knows {vocabulary} tokens, so bytes cannot be its tokens",
            "pass the folder of its tokenizer: --tokenizer FOLDER",
        )
    note = "no tokenizer was found: the bytes of the text are its tokens"
    return torch.tensor(list(content), dtype=torch.int64), (note,)


def _tokenize(text: str, folder: Path) -> Tensor:
    from transformers import AutoTokenizer

    from ..checkpoint.offline import hub_offline

    try:
        with hub_offline():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # raises anything for a bad folder
        raise UsageError(f"the tokenizer in {folder} cannot be used: {error}") from error
    return torch.tensor(ids, dtype=torch.int64)
