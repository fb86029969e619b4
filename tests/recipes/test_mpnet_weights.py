"""The published sentence encoder all-mpnet-base-v2, converted; needs scripts/fetch_mpnet.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert import load_model
from flashbias_convert.checkpoint import convert_checkpoint
from scripts.fetch_mpnet import find_model

transformers = pytest.importorskip("transformers")

NAMED = os.environ.get("FLASHBIAS_MPNET")
FOLDER = find_model(Path(NAMED)) if NAMED else None
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="set FLASHBIAS_MPNET to the folder that scripts/fetch_mpnet.py prints"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The original, and a converted copy that was saved and loaded."""
    assert FOLDER is not None
    # its config names a model with a head for masked words, whose weights it does not have
    config = json.loads((FOLDER / "config.json").read_text())
    output = tmp_path_factory.mktemp("mpnet") / "converted"
    done = convert_checkpoint(FOLDER, output, arch="transformers:MPNetModel", arch_args=config)
    assert done.plan.counts() == {"patched": 12}
    original = transformers.MPNetModel.from_pretrained(FOLDER).eval()
    return original, load_model(done.output, backend="sdpa")


def embed(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Sentence embeddings: means over the tokens, of length 1."""
    with torch.no_grad():
        states = model(ids, attention_mask=mask).last_hidden_state
    sums = (states * mask[..., None]).sum(1)
    return torch.nn.functional.normalize(sums, dim=-1)


@pytest.mark.parametrize("n", [16, 128, 384, 512])
def test_sentence_embeddings(pair: tuple[Any, Any], n: int) -> None:
    """Real text, one row full and one padded to the same length."""
    assert FOLDER is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    words = (FOLDER / "README.md").read_text().split()
    texts = [" ".join(words), " ".join(words[:4])]
    batch = tokenizer(
        texts, max_length=n, truncation=True, padding="max_length", return_tensors="pt"
    )
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert ids.shape == (2, n) and mask[0].all() and not mask[1].all()
    original, converted = pair
    expected, found = embed(original, ids, mask), embed(converted, ids, mask)
    assert ((expected * found).sum(-1) >= 0.99999).all()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    if n > 128:  # slow on a CPU
        return
    # the bias is what makes the difference: without it the embeddings are others
    table = original.encoder.relative_attention_bias.weight
    kept = table.data.clone()
    table.data.zero_()
    try:
        assert ((embed(original, ids, mask) * expected).sum(-1) < 0.999).any()
    finally:
        table.data.copy_(kept)
