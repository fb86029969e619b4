"""Language models with ALiBi: generation, caches, and masks beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flashbias_convert.models.caches import CACHE_FIELD
from flashbias_convert.swap import patched_owners

from .models import logits, make, padding, patch, tokens

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_generate(name: str, cache: str | None, padded: bool, dtype: torch.dtype) -> None:
    model, ids = make(name).to(dtype), tokens()
    mask = padding() if padded else torch.ones_like(ids)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(ids, **settings)
    # the original of Falcon cannot use a static cache at all
    if cache is not None:
        settings["cache_implementation"] = cache
    out = patch(model).generate(ids, **settings)
    same = (out.sequences == plain.sequences).all(1)
    for row in [r for r in range(3) if not same[r]]:
        pairs = [(p[row], o[row]) for p, o in zip(plain.logits, out.logits, strict=True)]
        theirs, _ = next(pair for pair in pairs if pair[0].argmax() != pair[1].argmax())
        # only a tie within the rounding may go either way
        top = theirs.float().topk(2).values
        assert top[0] - top[1] <= 8 * torch.finfo(dtype).eps * theirs.abs().max()
    assert dtype != torch.float32 or same.all()


def test_pieces_give_what_the_whole_gives(name: str) -> None:
    """A prompt in three pieces through a cache: queries start in the middle of the keys."""
    model, ids, mask = patch(make(name)), tokens(), padding()
    whole = logits(model, ids, attention_mask=mask)
    cache, parts = transformers.DynamicCache(), []
    for start, stop in ((0, 9), (9, 10), (10, 20)):
        with torch.no_grad():
            out = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                use_cache=True,
                **{CACHE_FIELD: cache},
            )
        parts.append(out.logits)
    real = mask.bool()
    assert (torch.cat(parts, 1)[real] - whole[real]).abs().max() < 1e-5


def test_a_mask_that_forgets_the_cached_tokens_is_refused(name: str) -> None:
    model, ids = patch(make(name)), tokens()
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE_FIELD: cache})
        for hidden in (0, 1):
            short = torch.ones(3, 1, dtype=torch.long)
            short[0] = hidden
            with pytest.raises(ValueError, match=r"cached tokens|attention_mask|tokens"):
                model(ids[:, :1], attention_mask=short, use_cache=True, **{CACHE_FIELD: cache})


@pytest.mark.parametrize("shape", [(3, 5), (3, 25), (1, 20)])
def test_a_mask_of_another_size_is_refused(name: str, shape: tuple[int, int]) -> None:
    if name == "gpt2" and shape == (1, 20):
        pytest.skip("the original takes one row for all")
    model, ids = patch(make(name)), tokens()
    with pytest.raises((ValueError, RuntimeError)):
        logits(model, ids, attention_mask=torch.ones(shape, dtype=torch.long))


def test_threads_that_share_a_model(name: str) -> None:
    """One calls the original, for a block of it trains, while another runs the fused path."""
    model, ids, mask = patch(make(name)), tokens(), padding()
    expected = logits(model, ids, attention_mask=mask)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: logits(model, ids, attention_mask=mask), range(40)))
    assert all(torch.equal(x, expected) for x in found)
    owner = patched_owners(model)[-1]
    with owner.lean(), ThreadPoolExecutor(1) as pool:
        assert owner.is_lean and not pool.submit(lambda: owner.is_lean).result()
