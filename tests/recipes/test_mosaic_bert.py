"""ALiBi in both directions, as MosaicBERT has it: classes of the same interface."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import inspect_model, patch_model, unpatch_model
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.recipe import Registry
from tests.recipes.model_parity import NoSquares
from tests.support import assert_parity

N, WIDTH, HEADS = 12, 16, 2


class BertUnpadSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, WIDTH // HEADS
        self.p_dropout, self.dropout = 0.1, nn.Dropout(0.1)
        self.Wqkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        max_seqlen_in_batch: int,
        indices: Tensor,
        attn_mask: Tensor,
        bias: Tensor,
    ) -> Tensor:
        batch, n = len(cu_seqlens) - 1, max_seqlen_in_batch
        packed = hidden_states.new_zeros(batch * n, 3 * WIDTH)
        packed[indices] = self.Wqkv(hidden_states)
        q, k, v = packed.view(batch, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / self.attention_head_size**0.5
        out = self.dropout((scores + self.changed(bias)).softmax(-1)) @ v
        return out.transpose(1, 2).reshape(batch * n, -1)[indices]

    def changed(self, bias: Tensor) -> Tensor:
        return bias


class Twice(BertUnpadSelfAttention):
    def changed(self, bias: Tensor) -> Tensor:
        return 2 * bias


class BertEncoder(nn.Module):
    kind: type[BertUnpadSelfAttention] = BertUnpadSelfAttention

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.layer = nn.ModuleList([self.kind(), self.kind()])
        self.rebuild_alibi_tensor(size)

    def rebuild_alibi_tensor(self, size: int, device: Any = None) -> None:
        places = torch.arange(size, device=device)
        slopes = torch.tensor([0.5, 0.125], device=device)
        distance = (places[:, None] - places[None, :]).abs()
        self._current_alibi_size, self.alibi = size, (-slopes[:, None, None] * distance)[None]

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        n = hidden_states.shape[1]
        padding = (1.0 - attention_mask[:, None, None].to(hidden_states.dtype)) * -10000.0
        if self._current_alibi_size < n:
            warnings.warn("larger", stacklevel=1)
            self.rebuild_alibi_tensor(n, hidden_states.device)
        else:
            self.alibi = self.alibi.to(hidden_states.device)
        bias = padding[:, :, :n, :n] + self.alibi[:, :, :n, :n].to(hidden_states.dtype)
        indices = attention_mask.flatten().nonzero().flatten()
        lengths = attention_mask.sum(-1).cumsum(0)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths]).int()
        x = hidden_states.flatten(0, 1)[indices]
        for layer in self.layer:
            x = x + layer(x, cu_seqlens, n, indices, attn_mask=attention_mask, bias=bias)
        return x


class EncoderOfTwice(BertEncoder):
    kind = Twice


def make(kind: type[BertEncoder] = BertEncoder, **sizes: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(**sizes).eval()


def inputs(n: int = N) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, n, WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, n, dtype=torch.long)
    mask[0, -5:], mask[1, -2:] = 0, 0
    return x.bfloat16().float(), mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@torch.no_grad()
def test_values(dtype: torch.dtype, backend: str) -> None:
    (x, mask), model = inputs(), make().to(dtype)
    plain, truth = model(x.to(dtype), mask), make().to(dtype).double()(x.double(), mask)
    plan = patch_model(model, backend=backend)
    assert plan.counts() == {"patched": 2}
    assert {site.terms() for site in plan.sites} == {("alibi",)}
    out = model(x.to(dtype), mask)
    assert_parity(out, plain, truth)
    bare = make().to(dtype)
    bare.alibi.zero_()
    slack = 2 * (plain.double() - truth).abs().max() + torch.finfo(dtype).eps
    assert (bare(x.to(dtype), mask).double() - truth).abs().max() > 3 * slack
    assert unpatch_model(model) == 2
    assert type(model) is BertEncoder and torch.equal(model(x.to(dtype), mask), plain)
    assert vars(model).keys() == vars(make()).keys()


@torch.no_grad()
def test_the_matrix_outlives_calls_and_copies() -> None:
    """The zero that stands in for it goes through `to`, and is not kept."""
    (x, mask), model = inputs(), make()
    patch_model(model, backend="sdpa")
    expected = model(x, mask)
    for one in (model, copy.deepcopy(model)):
        assert torch.equal(one(x, mask), expected)
        assert torch.equal(one.alibi, make().alibi) and one._current_alibi_size == 16
    assert inspect_model(model).counts() == {"patched": 2}


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_compiles_in_one_graph(training: bool) -> None:
    """In training, too, where the original's matrix is read."""
    (x, mask), model = inputs(), make()
    patch_model(model, backend="sdpa")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = make()(x, mask) if training else model(x, mask)
    torch.compiler.reset()
    compiled = torch.compile(model.train(training), backend="eager", fullgraph=True)
    # without its padding a batch has as many tokens as its mask says
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(compiled(x, mask), expected)
    assert torch.equal(model.alibi, make().alibi) and model._current_alibi_size == 16


@torch.no_grad()
def test_texts_longer_than_the_matrix_need_none() -> None:
    (x, mask), model = inputs(40), make()
    patch_model(model, backend="sdpa")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="larger")
        out = model(x, mask)
    assert model.alibi.shape[-1] == 16
    torch.testing.assert_close(out, make(size=40)(x, mask), rtol=1e-4, atol=1e-5)


def test_nothing_of_quadratic_size_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the kernel: the backends that run on a CPU do make scores."""
    (x, mask), model = inputs(600), make()
    patch_model(model, backend="sdpa")
    monkeypatch.setattr(ScoreBiasModule, "forward", lambda self, q, k, v, **kwargs: q.clone())
    with NoSquares(600), torch.no_grad():
        model(x, mask)


def test_training_is_the_original() -> None:
    (x, mask), grads = inputs(), []
    model = make()
    for change in (lambda _: None, patch_model):
        change(model)
        model.train().zero_grad()
        torch.manual_seed(2)
        model(x, mask).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        model.eval()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_what_computes_something_else_is_not_trusted() -> None:
    plan = inspect_model(make(EncoderOfTwice))
    assert plan.counts() == {"unsupported": 2}
    assert all("something else" in site.reason for site in plan.sites)


def test_another_matrix_is_refused() -> None:
    model = make()
    model.alibi = model.alibi - 0.1 * (model.alibi < -1).float()
    (reason,) = {site.reason for site in inspect_model(model).sites}
    assert "not minus a slope" in reason
    model.alibi = torch.empty(1, 2, 16, 16, device="meta")
    (reason,) = {site.reason for site in inspect_model(model).sites}
    assert "rebuild_alibi_tensor" in reason


def test_an_attention_without_its_encoder_is_unsupported() -> None:
    (site,) = inspect_model(BertUnpadSelfAttention()).sites
    assert site.status == "unsupported" and "BertEncoder" in site.reason


def test_other_classes_of_the_name_are_nobodys() -> None:
    other = type("BertUnpadSelfAttention", (nn.Module,), {})()
    assert Registry().find(other) is None
