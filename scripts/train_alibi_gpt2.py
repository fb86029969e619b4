"""Train a small byte-level GPT-2 with ALiBi on a text and save it as a transformers folder.

    python scripts/train_alibi_gpt2.py TEXT_FILE --output examples/alibi_gpt2_shakespeare

TEXT_FILE is tiny Shakespeare for the model in `examples/`. Tokens are bytes, so there is no
tokenizer. The first nine tenths are trained on; of the rest, the best weights are chosen by its
loss. The output folder gets ``model.safetensors`` (fp16), ``config.json``, ``training.json`` and
``README.md``. The number of steps is fixed before training starts (by ``--steps``, or from a
measured step time so that ``--seconds`` suffice), so the schedule always runs to its end.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from alibi_gpt2_page import page
from shakespeare import load_bytes, windows
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.models.alibi_gpt2 import (
    AlibiGPT2Config,
    AlibiGPT2LMHeadModel,
    AlibiGPT2Model,
)

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"layers": 6, "channels": 256, "heads": 8}
#: More steps than this only learn the text by heart.
MOST_STEPS = 4000
MEASURED_STEPS = 20
#: Kept back from --seconds for what comes after the last step.
RESERVE_SECONDS = 15.0


@dataclass(frozen=True)
class Hyperparameters:
    """Everything that shapes the training besides the text, the model, the seed and the steps."""

    batch: int = 64
    length: int = 512
    lr: float = 1e-3
    lr_end: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    warmup: float = 0.03
    clip_grad: float = 1.0
    dropout: float = 0.2


def make_config(args: argparse.Namespace, hyper: Hyperparameters) -> AlibiGPT2Config:
    """The model: the feed-forward width is what keeps the fp16 file below 9.6 MB."""
    return AlibiGPT2Config(
        vocab_size=256, n_embd=args.channels, n_layer=args.layers, n_head=args.heads,
        n_inner=15 * args.channels // 4, n_positions=hyper.length,
        attn_pdrop=hyper.dropout, resid_pdrop=hyper.dropout, embd_pdrop=hyper.dropout,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


class WithoutBias(AlibiGPT2Model):
    """The same weights without a bias: what the model would be if it knew no positions."""

    def build_bias(
        self, key_positions: Tensor, query_positions: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return torch.zeros(1, 1, 1, 1, dtype=dtype, device=key_positions.device)


def remove_bias(model: AlibiGPT2LMHeadModel) -> AlibiGPT2LMHeadModel:
    """A copy that adds no bias to its scores."""
    model = copy.deepcopy(model)
    model.transformer.__class__ = WithoutBias
    return model


# ---------------------------------------------------------------------------------------- training


def batches(text: Tensor, hyper: Hyperparameters, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows from random places, inputs and targets (batch, length), without end."""
    generator = torch.Generator(text.device).manual_seed(seed)
    step = torch.arange(hyper.length, device=text.device)
    starts = len(text) - hyper.length
    while True:
        shape = (hyper.batch, 1)
        at = torch.randint(starts, shape, device=text.device, generator=generator) + step
        yield text[at], text[at + 1]


def learning_rate(step: int, steps: int, hyper: Hyperparameters) -> float:
    """Linear warm-up, then half a cosine from `lr` to `lr_end`."""
    warmup = max(1, round(hyper.warmup * steps))
    if step < warmup:
        return hyper.lr * (step + 1) / warmup
    share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return hyper.lr_end + share * (hyper.lr - hyper.lr_end)


class Trainer:
    """A model, its optimizer and its data; `step` makes one update."""

    def __init__(
        self, model: AlibiGPT2LMHeadModel, text: Tensor, hyper: Hyperparameters, seed: int
    ) -> None:
        self.model, self.hyper, self.device = model.train(), hyper, text.device
        self.batches = batches(text, hyper, seed)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        free = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": hyper.weight_decay},
                  {"params": free, "weight_decay": 0.0}]  # fmt: skip
        self.optimizer = torch.optim.AdamW(groups, lr=hyper.lr, betas=hyper.betas, fused=True)

    def step(self, forward: Callable[[Tensor], Tensor], lr: float) -> Tensor:
        """Update the weights once; returns the loss, still on the device so that nothing waits."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = next(self.batches)
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=cuda):
            logits = forward(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.hyper.clip_grad)
        self.optimizer.step()
        return loss.detach()


@torch.no_grad()
def loss_on(
    model: AlibiGPT2LMHeadModel, text: Tensor, length: int, batch: int, most: int | None = None
) -> float:
    """Mean loss per byte (nats) in windows that do not overlap, in float32.

    Args:
        most: look at this many windows only, spread over the text.
    """
    training = model.training
    model.eval()
    inputs, targets = windows(text, length)
    if most is not None and len(inputs) > most:
        at = torch.linspace(0, len(inputs) - 1, most, device=text.device).long()
        inputs, targets = inputs[at], targets[at]
    total = 0.0
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        logits = model(x, use_cache=False).logits
        total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    model.train(training)
    return total / targets.numel()


def steps_that_fit(
    trainer: Trainer, forward: Callable[[Tensor], Tensor], deadline: float
) -> tuple[int, float]:
    """How many steps end before the deadline, and the seconds that compilation took."""
    started = time.perf_counter()
    for _ in range(3):
        trainer.step(forward, 0.0).item()
    compiled = time.perf_counter()
    for _ in range(MEASURED_STEPS):
        loss = trainer.step(forward, 0.0)
    loss.item()  # waits for the device
    seconds = (time.perf_counter() - compiled) / MEASURED_STEPS
    left = deadline - RESERVE_SECONDS - time.perf_counter()
    # a twentieth for the evaluations and for a card that gets hot
    steps = max(1, min(MOST_STEPS, int(0.95 * left / seconds)))
    print(f"{1000 * seconds:.1f} ms a step after {compiled - started:.1f} s: {steps} steps")
    return steps, compiled - started


def train(
    trainer: Trainer,
    forward: Callable[[Tensor], Tensor],
    steps: int,
    texts: tuple[Tensor, Tensor],
    every: int,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Run the whole schedule.

    Returns:
        The weights with the lowest loss on the held-out text, and the losses along the way.
    """
    model, hyper = trainer.model, trainer.hyper
    best, kept, curve = math.inf, {}, []
    started = time.perf_counter()
    for step in range(steps):
        loss = trainer.step(forward, learning_rate(step, steps, hyper))
        if (step + 1) % every and step + 1 < steps:
            continue
        row = {"step": step + 1, "batch_loss": loss.item()}
        if not math.isfinite(row["batch_loss"]):
            raise RuntimeError(f"the loss is {row['batch_loss']} at step {step + 1}")
        for name, text in zip(("train_loss", "held_out_loss"), texts, strict=True):
            row[name] = round(loss_on(model, text, hyper.length, hyper.batch, 256), 5)
        row["seconds"] = round(time.perf_counter() - started, 1)
        curve.append(row)
        print("  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
        if row["held_out_loss"] < best:
            best = row["held_out_loss"]
            kept = {k: v.clone() for k, v in model.state_dict().items()}
    return kept, curve


# ------------------------------------------------------------------------------------------ output


def save(model: AlibiGPT2LMHeadModel, folder: Path) -> Path:
    """Write the model in fp16 with its configuration; returns the path of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # it says nothing
    return folder / "model.safetensors"


def describe_device(device: torch.device) -> str:
    """The card's name, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def arguments_of(args: argparse.Namespace) -> str:
    """The options that shape the model and its training, as they would be typed."""
    names = ["seed", "seconds" if args.steps is None else "steps"]
    for name, default in (*SIZES.items(), *asdict(Hyperparameters()).items()):
        if getattr(args, name, default) != default:
            names.append(name)
    return " ".join(f"--{name} {getattr(args, name):g}" for name in names)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "examples/alibi_gpt2_shakespeare")
    parser.add_argument("--seconds", type=float, default=240.0, help="time up to the saved file")
    parser.add_argument("--steps", type=int, help="fixed number of steps, whatever they take")
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("batch", "length", "lr", "dropout"):
        default = getattr(Hyperparameters, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    return parser.parse_args()


def main() -> None:
    """Train, save, and only then measure what the saved file is worth."""
    started = time.perf_counter()
    args = parse_arguments()
    device = torch.device(args.device)
    hyper = Hyperparameters(args.batch, args.length, args.lr, dropout=args.dropout)
    texts = tuple(load_bytes(args.text, part).to(device) for part in ("train", "held out"))
    torch.manual_seed(args.seed)
    model = AlibiGPT2LMHeadModel(make_config(args, hyper)).to(device)
    initial = copy.deepcopy(model.state_dict())

    def forward(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens, use_cache=False).logits
        return logits

    run = torch.compile(forward) if args.compile else forward
    steps, compile_seconds = args.steps, 0.0
    if steps is None:
        fit = Trainer(model, texts[0], hyper, args.seed)
        steps, compile_seconds = steps_that_fit(fit, run, started + args.seconds)
        model.load_state_dict(initial)
    # seeded anew, so that the result depends on the number of steps but not on the measurement
    torch.manual_seed(args.seed)
    training_started = time.perf_counter()
    kept, losses = train(Trainer(model, texts[0], hyper, args.seed), run, steps, texts, args.every)
    train_seconds = time.perf_counter() - training_started
    model.load_state_dict(kept)
    path = save(model.eval(), args.output)
    print(f"saved {path} after {time.perf_counter() - started:.0f} s", flush=True)

    saved = AlibiGPT2LMHeadModel.from_pretrained(args.output, dtype=torch.float32)
    saved = saved.to(device).eval()

    def perplexity(of: AlibiGPT2LMHeadModel, text: Tensor, most: int | None = None) -> float:
        return round(math.exp(loss_on(of, text, hyper.length, hyper.batch, most)), 4)

    record: dict[str, Any] = {
        "text": args.text.name,
        "train_bytes": len(texts[0]),
        "held_out_bytes": len(texts[1]),
        "card": describe_device(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": args.seed,
        "arguments": arguments_of(args),
        "fixed_steps": args.steps is not None,
        "steps": steps,
        "best_step": min(losses, key=lambda row: row["held_out_loss"])["step"],
        "model": {k: getattr(saved.config, k) for k in ("n_layer", "n_embd", "n_head", "n_inner")},
        "parameters": sum(p.numel() for p in saved.parameters()),
        "hyperparameters": asdict(hyper),
        "compile_seconds": round(compile_seconds, 1),
        "train_seconds": round(train_seconds, 1),
        "file_bytes": path.stat().st_size,
        "perplexity": perplexity(saved, texts[1]),
        "perplexity_without_bias": perplexity(remove_bias(saved), texts[1]),
        "perplexity_before_rounding": perplexity(model, texts[1]),
        "train_perplexity": perplexity(saved, texts[0], 256),
        "losses": losses,
    }
    content = json.dumps(record, indent=2) + "\n"
    (args.output / "training.json").write_text(content, encoding="utf-8")
    (args.output / "README.md").write_text(page(record), encoding="utf-8")
    print(json.dumps({k: v for k, v in record.items() if k != "losses"}))


if __name__ == "__main__":
    main()
