"""ALiBi in both directions, as Jina-BERT has it: classes of the same interface."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import fallback, inspect_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.recipe import Registry
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, NoSquares, randomised

N, WIDTH, HEADS = 12, 16, 2


class JinaBertSelfAttention(nn.Module):
    def __init__(self, normed: bool = False, is_decoder: bool = False) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, WIDTH // HEADS
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        if normed:
            self.layer_norm_q, self.layer_norm_k = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.position_embedding_type, self.is_decoder = "alibi", is_decoder

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        q, k, v = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        if hasattr(self, "layer_norm_q"):
            q, k = self.layer_norm_q(q), self.layer_norm_k(k)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / self.attention_head_size**0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        assert bias is not None
        weights = self.dropout((scores + self.changed(bias)).softmax(-1))
        if head_mask is not None:
            weights = weights * head_mask
        out = (weights @ v).transpose(1, 2).flatten(2)
        return (out, scores) if output_attentions else (out,)

    def changed(self, bias: Tensor) -> Tensor:
        return bias


class Twice(JinaBertSelfAttention):
    def changed(self, bias: Tensor) -> Tensor:
        return 2 * bias


class Output(NamedTuple):
    last_hidden_state: Tensor
    attentions: list[Tensor]


class JinaBertEncoder(nn.Module):
    """Keeps a matrix, and makes a larger one where it must."""

    def __init__(self, layers: list[nn.Module], size: int = 16) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)
        self.num_attention_heads = HEADS
        self.register_buffer("alibi", self.rebuild_alibi_tensor(size=size), persistent=False)

    def rebuild_alibi_tensor(self, size: int, device: Any = None) -> Tensor:
        places = torch.arange(size, device=device)
        slopes = torch.tensor([0.5, 0.125], device=device)
        self._current_alibi_size = size
        return (-slopes[:, None, None] * (places[:, None] - places[None, :]).abs())[None]

    def matrix(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self._current_alibi_size < n:
            made = self.rebuild_alibi_tensor(size=n, device=x.device).to(x.dtype)
            self.register_buffer("alibi", made, persistent=False)
        elif self.alibi.device != x.device:
            self.alibi = self.alibi.to(x.device)
        return self.alibi[:, :, :n, :n]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = False,
    ) -> Any:
        bias, weights = self.matrix(hidden_states), []
        for i, layer in enumerate(self.layer):
            head = None if head_mask is None else head_mask[i]
            out = layer(
                hidden_states, attention_mask, head, encoder_hidden_states,
                encoder_attention_mask, None, output_attentions, bias,
            )  # fmt: skip
            hidden_states = hidden_states + out[0]
            weights.extend(out[1:])
        return Output(hidden_states, weights)


class Anew(JinaBertEncoder):
    """Makes its matrix in every call and keeps none."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        del self.alibi

    def matrix(self, x: Tensor) -> Tensor:
        return self.rebuild_alibi_tensor(size=x.shape[1], device=x.device).to(x.dtype)


Anew.__name__ = Anew.__qualname__ = "JinaBertEncoder"
Anew.__module__ = "elsewhere"
Twice.__name__ = "JinaBertSelfAttention"


def make(kind: Any = JinaBertEncoder, attention: Any = JinaBertSelfAttention, **how: Any) -> Any:
    layers: list[nn.Module] = [attention(**how), attention(**how)]
    return randomised(kind(layers), std=0.4)


def inputs(model: Any, n: int = N) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask as BERT makes it: zeros, and very small numbers for padding."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(3, n, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
    mask = torch.zeros(3, 1, 1, n, dtype=dtype)
    mask[0, ..., -5:], mask[1, ..., -2:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    return x, mask


def case(kind: Any = JinaBertEncoder, n: int = N, masked: bool = True, **how: Any) -> Case:
    def run(model: Any) -> Tensor:
        x, mask = inputs(model, n)
        out: Tensor = model(x, mask if masked else None).last_hidden_state
        return out[mask[:, 0, 0] == 0] if masked else out

    return Case(lambda: make(kind, **how), run, ("key.bias",), {"patched": 2})


CASES = {
    "kept": case(),
    "no mask": case(masked=False),
    "normalised": case(normed=True),
    "anew": case(Anew),
}


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.compare(CASES[name], dtype, backend)


@torch.no_grad()
def test_bias_and_mask_matter() -> None:
    one = CASES["kept"]
    model, bare = one.make(), one.make()
    bare.alibi.zero_()
    assert (one.output(model) - one.output(bare)).abs().max() > 1e-2
    x, mask = inputs(model)
    seen = mask[:, 0, 0] == 0
    one.patched(model)
    assert (model(x).last_hidden_state[seen] - one.output(model)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["kept", "anew"])
def test_comes_and_goes(name: str) -> None:
    parity.check_comes_and_goes(CASES[name], pickles=False)


def test_training_is_the_original() -> None:
    parity.check_training(CASES["normalised"], together=True)


@torch.no_grad()
def test_texts_longer_than_the_matrix_need_none() -> None:
    longer = case(n=40)
    model = longer.make()
    expected = longer.output(model)
    model = longer.make()
    longer.patched(model)
    torch.testing.assert_close(longer.output(model), expected, rtol=1e-4, atol=1e-5)
    assert model.alibi.shape[-1] == 16


def test_nothing_of_quadratic_size_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the kernel: the backends that run on a CPU do make scores."""
    for kind in (JinaBertEncoder, Anew):
        model, long = make(kind), case(n=600)
        long.patched(model)
        with monkeypatch.context() as context:
            context.setattr(ScoreBiasModule, "forward", lambda self, q, k, v, **kwargs: q.clone())
            with NoSquares(600):
                long.output(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["kept", "anew"])
def test_compiles_in_one_graph(name: str) -> None:
    model = CASES[name].make()
    CASES[name].patched(model)
    expected = CASES[name].output(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(CASES[name].run(compiled), expected)


@torch.no_grad()
@pytest.mark.parametrize("n", [N, 40])
def test_the_original_compiles_in_one_graph(n: int) -> None:
    """In training, where its own matrix is read, and made anew for a longer text."""
    model = CASES["kept"].make()
    CASES["kept"].patched(model)
    x, mask = inputs(model, n)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = make().eval()(x, mask).last_hidden_state
    torch.compiler.reset()
    compiled = torch.compile(model.train(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, mask).last_hidden_state, expected)
    assert model.alibi.shape[-1] == model._current_alibi_size == max(n, 16)


def test_attention_weights_come_from_the_original() -> None:
    def run(model: Any) -> Any:
        found = model(*inputs(model), output_attentions=True)
        return (found.last_hidden_state, *found.attentions)

    parity.check_attention_weights(CASES["kept"], run)


@torch.no_grad()
def test_head_masks_and_masks_of_pairs_run_the_original() -> None:
    model, plain = make(), make()
    x, mask = inputs(model)
    heads = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    pairs = mask.expand(3, 1, N, N).clone()
    CASES["kept"].patched(model)
    for given in ((x, mask, [None, heads]), (x, pairs)):
        fallback._warn.cache_clear()
        with pytest.warns(BackendFallbackWarning):
            out = model(*given)
        assert torch.equal(out.last_hidden_state, plain(*given).last_hidden_state)


def test_what_is_not_trusted() -> None:
    model = make(attention=Twice)
    assert all("something else" in site.reason for site in inspect_model(model).sites)
    model = make()
    model.alibi = model.alibi - 0.1 * (model.alibi < -1).float()
    before = model.alibi.clone()
    assert all("another ALiBi" in site.reason for site in inspect_model(model).sites)
    assert torch.equal(model.alibi, before) and model._current_alibi_size == 16
    assert all("decoder" in site.reason for site in inspect_model(make(is_decoder=True)).sites)


def test_an_attention_without_its_encoder_is_unsupported() -> None:
    (site,) = inspect_model(JinaBertSelfAttention()).sites
    assert site.status == "unsupported" and "JinaBertEncoder" in site.reason


def test_other_classes_of_the_name_are_nobodys() -> None:
    other = type("JinaBertSelfAttention", (nn.Module,), {})()
    assert Registry().find(other) is None
