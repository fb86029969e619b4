"""Time and memory of whole training steps: ALiBi GPT-2, and a plain Transformer with a bias.

python scripts/bench_training.py gpt2 [--tokens 2048] [--layers 48]
python scripts/bench_training.py plain [--tokens 4096 8192 16384 32768 65536] [--learnable]

The models of the FlashBias paper: GPT-2 of 48 layers, 1,600 channels, 50 heads and 1.5 billion
parameters, causal, with ALiBi; and 8 layers of 512 channels, 8 heads and 1,024 channels of
feed-forward with a bias of rank 8, which all layers share. Weights are fp32 under bf16 autocast, a
step is forward, backward and AdamW, batch 1; `--checkpoint` computes layers again in the backward
pass, `--compile` compiles each layer. Beside ours: no bias, torch's attention with the dense bias
(made once, in bf16, causality included; in every layer if it is trained) and compiled FlexAttention
(ALiBi in its score_mod, else the dense bias). `peak_mib` is everything, weights and optimizer
included; `error` is the relative error of one attention call at no more than 2,048 tokens against
float64. Adds rows to bench_training.csv; one that runs out of memory says so.
"""

from __future__ import annotations

import argparse
import csv
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashbias_convert import PreparedBias, ScoreBias, flashbias_attention
from flashbias_convert.benchmark.timing import measure
from flashbias_convert.nn import AlibiBias, LowRankBias

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "model", "attention", "tokens", "median_ms", "p20_ms", "p80_ms", "peak_mib", "status", "error",
    "repeats", "first_call_s", "layers", "channels", "heads", "parameters", "learnable",
    "checkpoint", "compile", "dtype", "device", "torch",
)  # fmt: skip
#: layers, channels, heads, feed-forward, vocabulary
SIZES = {"gpt2": (48, 1600, 50, 6400, 50_257), "plain": (8, 512, 8, 1024, 256)}
RANK = 8
OURS, NO_BIAS, SDPA, FLEX = "flashbias", "no bias, SDPA", "dense bias, SDPA", "FlexAttention"

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
    """Tokens to the loss of the next one (gpt2), or of the same one (plain)."""

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
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


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
        """(1, H, N, N), with minus infinity where causality hides a key."""
        with torch.autocast(torch.device(self.args.device).type, enabled=False):
            dense = self.bias().dense(self.tokens, self.tokens).to(dtype)[None]
        if self.causal:
            hidden = torch.ones(dense.shape[-2:], dtype=torch.bool, device=dense.device).triu(1)
            dense = dense.masked_fill(hidden, float("-inf"))
        return dense

    def attend(self, name: str) -> Attend:
        """q, k, v -> output, for one of the names."""
        causal, half = self.causal, getattr(torch, self.args.dtype)
        if name == OURS:
            backend = self.args.backend
            prepared = None if self.args.learnable else PreparedBias(self.bias())
            return lambda q, k, v: flashbias_attention(
                q, k, v, prepared or self.bias(), causal=causal, backend=backend
            )
        if name == NO_BIAS:
            return partial(F.scaled_dot_product_attention, is_causal=causal)
        if name == FLEX:
            return self._flex(half)
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


@torch.no_grad()
def error(name: str, args: argparse.Namespace, tokens: int) -> float:
    """Relative error of one call against float64."""
    case = Case(args, min(tokens, 2048))
    shape = (1, case.heads, case.tokens, (args.channels or SIZES[args.model][1]) // case.heads)
    q, k, v = (torch.randn(shape, device=args.device).to(getattr(torch, args.dtype))
               for _ in range(3))  # fmt: skip
    truth = flashbias_attention(
        *(x.double() for x in (q, k, v)), case.bias(), causal=case.causal, backend="eager"
    )
    return float((case.attend(name)(q, k, v).double() - truth).norm() / truth.norm())


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for tokens in args.tokens:
        for name in args.attention:
            facts = {"model": args.model, "attention": name, "tokens": tokens}
            try:
                yield {**facts, **_timed(name, tokens, args)}
            except (RuntimeError, ValueError, NotImplementedError) as problem:
                out = isinstance(problem, torch.OutOfMemoryError)
                status = "out of memory" if out else str(problem).splitlines()[0][:120]
                yield {**facts, "status": status}
            gc.collect()
            torch._dynamo.reset()
            if torch.device(args.device).type == "cuda":
                torch.cuda.empty_cache()


def _timed(name: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    device, half = torch.device(args.device), getattr(torch, args.dtype)
    wrong = "" if name == NO_BIAS else f"{error(name, args, tokens):.2e}"
    case = Case(args, tokens)
    model = Model(args, case.attend(name)).to(device)
    weights = [*model.parameters(), *(p for p in case.source.parameters() if p.requires_grad)]
    optimizer = torch.optim.AdamW(weights, fused=device.type == "cuda")
    ids = torch.randint(model.embed.num_embeddings, (1, tokens + 1), device=device)
    labels = ids[:, 1:] if case.causal else ids[:, :-1]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, half, enabled=half != torch.float32):
            loss = model(ids[:, :-1], labels)
        loss.backward()
        optimizer.step()

    found = measure(step, device, repeats=args.repeats, budget_s=60)
    times = found.times
    return {
        "median_ms": f"{times.median_ms:.3f}", "p20_ms": f"{times.p20_ms:.3f}",
        "p80_ms": f"{times.p80_ms:.3f}", "repeats": times.repeats, "error": wrong, "status": "ok",
        "peak_mib": "" if found.peak_mib is None else f"{found.peak_mib:.0f}",
        "first_call_s": f"{found.first_call_s:.1f}", "parameters": sum(p.numel() for p in weights),
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    cuda, names = torch.cuda.is_available(), [OURS, NO_BIAS, SDPA, FLEX]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(SIZES))
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--attention", nargs="+", choices=names, default=names)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--channels", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--learnable", action="store_true", help="the bias is trained, too")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        default="bfloat16" if cuda else "float32")  # fmt: skip
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_training.csv")
    args = parser.parse_args()
    args.layers = args.layers or SIZES[args.model][0]
    plain = [2**i for i in range(12, 17)]
    args.tokens = args.tokens or ([2048] if args.model == "gpt2" else plain)
    return args


def main() -> None:
    """Print and append a row per way to attend and number of tokens."""
    args = arguments()
    cuda = torch.device(args.device).type == "cuda"
    sizes = SIZES[args.model]
    facts = {
        "layers": args.layers, "channels": args.channels or sizes[1],
        "heads": args.heads or sizes[2], "learnable": args.learnable,
        "checkpoint": args.checkpoint, "compile": args.compile, "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__,
    }  # fmt: skip
    args.output.parent.mkdir(parents=True, exist_ok=True)
    new = not args.output.exists()
    with args.output.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        for row in rows(args):
            writer.writerow({**row, **facts})
            file.flush()
            print(row, flush=True)


if __name__ == "__main__":
    main()
