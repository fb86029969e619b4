"""Models and biases of `bench_training.py`, every way to attend, and what is true of a step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashbias_convert import PreparedBias, ScoreBias, flashbias_attention
from flashbias_convert.nn import AlibiBias, LowRankBias

#: layers, channels, heads, feed-forward, vocabulary
SIZES = {"gpt2": (48, 1600, 50, 6400, 50_257), "plain": (8, 512, 8, 1024, 256)}
RANK = 8
OURS, NO_BIAS, SDPA, FLEX = "flashbias", "no bias, SDPA", "dense bias, SDPA", "FlexAttention"

#: names that are no peers: the formula step by step, and the reference
PLAIN, REFERENCE = "formula", "reference"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and feed-forward, with norms in front."""

    def __init__(self, channels: int, heads: int, feedforward: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, feedforward), nn.Linear(feedforward, channels)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(self.attend(*qkv.unbind(0)).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Tokens to the loss of the next one; tokens are drawn, so that none is easy."""

    def __init__(self, args: argparse.Namespace, attend: Attend) -> None:
        super().__init__()
        _, channels, heads, feedforward, vocabulary = SIZES[args.model]
        channels, heads = args.channels or channels, args.heads or heads
        feedforward = feedforward * channels // SIZES[args.model][1]
        self.embed = nn.Embedding(vocabulary, channels)
        self.blocks = nn.ModuleList(
            Block(channels, heads, feedforward, attend) for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(channels)
        self.again = args.checkpoint
        if args.compile:
            for block in self.blocks:
                block.compile()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, 1).to(wide), labels.flatten())


class Case:
    """The bias of a run, and every way to add it."""

    def __init__(self, args: argparse.Namespace, tokens: int) -> None:
        self.args, self.tokens, self.causal = args, tokens, args.model == "gpt2"
        self.heads = args.heads or SIZES[args.model][2]
        torch.manual_seed(0)
        made = AlibiBias(self.heads, learnable=args.learnable) if self.causal else None
        self.source = made or LowRankBias(self.heads, tokens, tokens, RANK)
        if isinstance(self.source, LowRankBias):
            nn.init.normal_(self.source.phi_k)
        self.source.to(args.device).requires_grad_(args.learnable)

    def bias(self) -> ScoreBias:
        made: ScoreBias = self.source()
        return made

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """(1, H, N, N), with minus infinity where causality hides a key, made head by head.

        Only the result has to fit, not a matrix of all heads in fp32.
        """
        n, bias = self.tokens, self.bias()
        with torch.autocast(torch.device(self.args.device).type, enabled=False):
            if self.args.learnable:  # gradients flow through it
                return torch.stack([self._head(bias, h, dtype) for h in range(self.heads)])[None]
            out = torch.empty(1, self.heads, n, n, dtype=dtype, device=self.args.device)
            for h in range(self.heads):
                out[0, h] = self._head(bias, h, dtype)
        return out

    def _head(self, bias: ScoreBias, head: int, dtype: torch.dtype) -> Tensor:
        dense = bias.select_heads([head]).dense(self.tokens, self.tokens)[0].to(dtype)
        if not self.causal:
            return dense
        hidden = torch.ones(dense.shape, dtype=torch.bool, device=dense.device).triu_(1)
        return dense.masked_fill(hidden, float("-inf"))

    def attend(self, name: str) -> Attend:
        """q, k, v -> output, for one of the names."""
        causal, half = self.causal, getattr(torch, self.args.dtype)
        if name == OURS:
            backend = self.args.backend
            prepared = None if self.args.learnable else PreparedBias(self.bias())
            return lambda q, k, v: flashbias_attention(
                q, k, v, prepared or self.bias(), causal=causal, backend=backend
            )
        if name == REFERENCE:
            return lambda q, k, v: flashbias_attention(
                q, k, v, self.bias(), causal=causal, backend="eager"
            )
        if name == NO_BIAS:
            return partial(F.scaled_dot_product_attention, is_causal=causal)
        if name == FLEX:
            return self._flex(half)
        if name == PLAIN:
            return lambda q, k, v: plain(q, k, v, self.matrix(q.dtype))
        kept = None if self.args.learnable else self.matrix(half)  # else one for every backward

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = self.matrix(q.dtype) if kept is None else kept
            return F.scaled_dot_product_attention(q, k, v, mask)

        return dense

    def _flex(self, half: torch.dtype) -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + self.source.slopes[h] * (j - i)

        if self.causal:
            blocks = create_block_mask(
                lambda b, h, i, j: j <= i, None, None, self.tokens, self.tokens,
                device=self.args.device,
            )  # fmt: skip
            run = torch.compile(partial(flex_attention, score_mod=alibi, block_mask=blocks))
            return lambda q, k, v: run(q, k, v)
        kept = None if self.args.learnable else self.matrix(half)

        def with_matrix(q: Tensor, k: Tensor, v: Tensor, dense: Tensor) -> Any:
            return flex_attention(q, k, v, lambda s, b, h, i, j: s + dense[0, h, i, j])

        compiled = torch.compile(with_matrix, dynamic=False)
        return lambda q, k, v: compiled(q, k, v, self.matrix(q.dtype) if kept is None else kept)


def plain(q: Tensor, k: Tensor, v: Tensor, matrix: Tensor) -> Tensor:
    """The formula, step by step, as autocast has it."""
    return ((q @ k.mT) * q.shape[-1] ** -0.5 + matrix).softmax(-1).to(v.dtype) @ v


def step_errors(name: str, args: argparse.Namespace, tokens: int) -> tuple[float, float]:
    """Relative errors of the loss and of the gradient of all weights, the bias's included.

    Against the reference in float64, for a model of no more than 2 layers and 1,024 tokens.
    """
    small = argparse.Namespace(**{**vars(args), "layers": min(args.layers, 2), "batch": 1})
    exact = argparse.Namespace(**{**vars(small), "compile": False, "checkpoint": False})
    tokens = min(tokens, 1024)
    wide = _loss_and_gradient(REFERENCE, exact, tokens, torch.float64)
    found = _loss_and_gradient(name, small, tokens, torch.float32)
    loss, gradient = ((a.double() - b).norm() / b.norm() for a, b in zip(found, wide, strict=True))
    return float(loss), float(gradient)


def _loss_and_gradient(
    name: str, args: argparse.Namespace, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    case, model, batch = setting(name, args, tokens)
    model.to(dtype)
    case.source.to(dtype)
    loss = loss_of(model, batch, args) if dtype == torch.float32 else model(*batch)
    weights = trained(case, model)
    loss.backward()
    return loss.detach(), torch.cat([w.grad.flatten() for w in weights if w.grad is not None])


def setting(
    name: str, args: argparse.Namespace, tokens: int
) -> tuple[Case, Model, tuple[Tensor, Tensor]]:
    """A way to attend, a model that does, and tokens with labels; the same numbers every time."""
    case = Case(args, tokens)
    torch.manual_seed(1)
    model = Model(args, case.attend(name)).to(args.device)
    ids = torch.randint(model.embed.num_embeddings, (args.batch, tokens + 1), device=args.device)
    return case, model, (ids[:, :-1], ids[:, 1:])


def trained(case: Case, model: Model) -> list[nn.Parameter]:
    """Weights of the model, and of a bias that is trained."""
    return [*model.parameters(), *(p for p in case.source.parameters() if p.requires_grad)]


def loss_of(model: Model, batch: tuple[Tensor, Tensor], args: argparse.Namespace) -> Tensor:
    """Under autocast, unless everything is fp32."""
    half = getattr(torch, args.dtype)
    device = torch.device(args.device).type
    with torch.autocast(device, half if half != torch.float32 else None,
                        enabled=half != torch.float32):  # fmt: skip
        loss: Tensor = model(*batch)
    return loss
