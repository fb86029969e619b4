"""Graphs that a trace of one input leaves behind, with other inputs: masks, lengths, batches.

The reference is the original model in eager mode, for each of the inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from flashbias_convert import patch_model
from tests.recipes.alibi.models import NAMES, make, true_logits
from tests.recipes.model_parity import randomised
from tests.recipes.test_torchvision_swin import make as make_swin
from tests.recipes.test_transformers_distance import mpnet, t5
from tests.support import assert_parity

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, LENGTH = Dim("batch", min=1, max=64), Dim("length", min=2, max=60)


class Words(nn.Module):
    """A model that takes tokens and a padding mask by their places, and returns one tensor."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.config.use_cache = False
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, bbox: Tensor | None = None) -> Tensor:
        own = {} if bbox is None else {"bbox": bbox}
        out: Tensor = self.model(input_ids=ids, attention_mask=mask, **own)[0]
        return out.masked_fill(mask[..., None] == 0, 0.0)  # padding is read by nobody


def words(batch: int, n: int, padded: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask of which the first row has that much padding on the left."""
    mask = torch.ones(batch, n, dtype=torch.long)
    mask[0, :padded] = 0
    return torch.randint(3, 97, (batch, n), generator=torch.Generator().manual_seed(seed)), mask


def boxes(batch: int, n: int, seed: int = 2) -> Tensor:
    corner = torch.randint(0, 60, (batch, n, 2), generator=torch.Generator().manual_seed(seed))
    return torch.cat([corner, corner + 20], -1)


def lilt() -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 64, "max_2d_position_embeddings": 128,
        "channel_shrink_ratio": 2,
    }  # fmt: skip
    return randomised(transformers.LiltModel(transformers.LiltConfig(**sizes)))


@dataclass(frozen=True)
class Case:
    """A model and a call that is traced, and calls that go through what the trace leaves.

    Attributes:
        make: the original, always the same.
        example: what is traced: nothing is padded.
        others: other inputs: padding, another batch, another length.
        open: which sizes of the inputs an export leaves open.
        truth: what the original computes in float64, of the model and its inputs.
    """

    make: Callable[[], nn.Module]
    example: tuple[Tensor, ...]
    others: tuple[tuple[Tensor, ...], ...]
    open: tuple[dict[int, Dim], ...]
    truth: Callable[..., Tensor]

    def patched(self) -> nn.Module:
        model = self.make()
        plan = patch_model(model, backend="sdpa", method="exact", force_all=True)
        assert plan.patched
        return model

    @torch.no_grad()
    def check(self, function: Callable[..., Tensor]) -> None:
        """`function` computes what the original does, with the traced input and the others."""
        for inputs in (self.example, *self.others):
            model = self.make()
            plain, truth = model(*inputs), self.truth(model, inputs)
            assert_parity(function(*inputs), plain, truth)


def in_float64(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    wide = copy.deepcopy(model).double()
    out: Tensor = wide(*(x.double() if x.is_floating_point() else x for x in inputs))
    return out


def alibi_in_float64(model: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    return true_logits(model.model, *inputs)


def texts(
    make_model: Callable[[], Any],
    truth: Callable[..., Tensor] = in_float64,
    *,
    with_boxes: bool = False,
) -> Case:
    def call(batch: int, n: int, padded: int) -> tuple[Tensor, ...]:
        return (*words(batch, n, padded), *([boxes(batch, n)] if with_boxes else []))

    return Case(
        lambda: Words(make_model()),
        call(3, 20, 0),
        (call(3, 20, 7), call(2, 25, 4), call(2, 11, 3)),
        ({0: BATCH, 1: LENGTH},) * (3 if with_boxes else 2),
        truth,
    )


def images(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch)),)


CASES = {
    **{name: texts(lambda name=name: make(name), alibi_in_float64) for name in NAMES},  # type: ignore[misc]
    "t5": texts(lambda: t5("t5").encoder),
    "umt5": texts(lambda: t5("umt5").encoder),
    "mpnet": texts(mpnet),
    "lilt": texts(lilt, with_boxes=True),
    "swin": Case(
        lambda: randomised(make_swin()), images(3), (images(5),), ({0: BATCH},), in_float64
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_jit_trace_serves_other_masks_lengths_and_batches(name: str) -> None:
    """Above all, a mask is not dropped because that of the trace hid nothing."""
    case = CASES[name]
    model = case.patched()
    with torch.no_grad():
        case.check(torch.jit.trace(model, case.example, check_trace=False))
    case.check(model)  # the trace left nothing behind


@pytest.mark.parametrize("name", CASES)
def test_an_exported_program_has_open_lengths_and_batches(name: str) -> None:
    case = CASES[name]
    model = case.patched()
    with torch.no_grad():
        program = torch.export.export(model, case.example, dynamic_shapes=case.open, strict=False)
    case.check(program.module())
    case.check(model)


@pytest.mark.parametrize("name", [NAMES[0], "t5", "mpnet", "lilt"])
def test_a_compiled_model_serves_other_masks_lengths_and_batches(name: str) -> None:
    """Longer ones, shorter ones, and the first again: no terms are those of another length."""
    case = CASES[name]
    torch.compiler.reset()
    model = case.patched()
    compiled: Any = torch.compile(model, backend="eager")
    case.check(compiled)
    case.check(compiled)
    case.check(model)
