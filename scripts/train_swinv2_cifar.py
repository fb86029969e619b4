"""Train a small SwinV2 on CIFAR-10 in a few minutes and save it as a timm checkpoint folder.

    python scripts/train_swinv2_cifar.py DATA_FOLDER --output examples/swinv2_cifar10 --minutes 7

DATA_FOLDER holds ``cifar10_train_jpgpack.npz`` and ``cifar10_test_jpgpack.npz`` (see
``cifar_jpgpack.py``). The images are enlarged to 64 x 64 and cut into patches of 2 x 2, which gives
windows of 256 tokens in the first two stages: long enough for the learned position bias to be
worth converting. The output folder gets ``model.safetensors``, ``config.json`` and
``training.json`` and loads with ``timm.create_model("local-dir:FOLDER", pretrained=True)``.

The number of steps is fixed before training starts (by ``--steps`` or ``--epochs``, or from a
measured step time so that ``--minutes`` suffice), so the schedule always runs to its end.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from cifar_jpgpack import CLASS_NAMES, INPUT_SIZE, MEAN, STD, load_split, to_model_input
from safetensors.torch import load_file, save_file
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor, nn

ARCHITECTURE = "swinv2_tiny_window16_256"
MODEL_ARGS: dict[str, Any] = {
    "img_size": INPUT_SIZE,
    "patch_size": 2,
    "embed_dim": 64,
    "depths": [2, 4, 4],
    "num_heads": [2, 4, 8],
    "window_size": 16,
}
CALIBRATION_STEPS = 20
LOG_EVERY = 200
# Kept back from --minutes for reading the test set during training and for writing the files.
RESERVE_SECONDS = 20.0


@dataclass(frozen=True)
class Hyperparameters:
    """Everything that shapes the training besides the data, the seed and the number of steps."""

    batch: int = 512
    lr: float = 1.5e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.05
    warmup: float = 0.05
    clip_grad: float = 1.0
    drop_path: float = 0.1
    label_smoothing: float = 0.1
    crop_padding: int = 4
    erase_probability: float = 0.25
    mix_probability: float = 0.5
    mixup_alpha: float = 0.8
    unmixed_tail: float = 0.1
    ema_decay: float = 0.998


# ------------------------------------------------------------------------------------- the model


class Float32Sequential(nn.Sequential):
    """A Sequential that ignores autocast.

    The bias runs up to 16 and is added to fp32 scores. Under bf16 autocast its values would be
    rounded to steps of 1/16, and the saved model would be evaluated with another bias than it was
    trained with.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., 2) coordinates -> (..., heads), in float32 whatever autocast says."""
        with torch.autocast(device_type=x.device.type, enabled=False):
            return super().forward(x.float())


def window_attentions(model: nn.Module) -> list[tuple[str, WindowAttention]]:
    """The model's attention modules with their qualified names, in the order they run."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, WindowAttention)]


def build_model(drop_path: float = 0.0) -> nn.Module:
    """A SwinV2 of three stages: 32 x 32 tokens (windows of 256), 16 x 16 (256), 8 x 8 (64)."""
    model_args = {k: tuple(v) if isinstance(v, list) else v for k, v in MODEL_ARGS.items()}
    return timm.create_model(
        ARCHITECTURE, num_classes=len(CLASS_NAMES), drop_path_rate=drop_path, **model_args
    )


def keep_bias_in_float32(model: nn.Module) -> None:
    """Shield the networks that make the position bias from autocast; state-dict keys stay."""
    for _, attention in window_attentions(model):
        attention.cpb_mlp.__class__ = Float32Sequential


def remove_bias(model: nn.Module) -> nn.Module:
    """A copy whose bias networks return zero: a constant bias, which the softmax ignores."""
    model = copy.deepcopy(model)
    for _, attention in window_attentions(model):
        nn.init.zeros_(attention.cpb_mlp[-1].weight)
    return model


def logit_scales(model: nn.Module) -> dict[str, list[float]]:
    """The factor on the cosine of query and key, for each attention module and head."""
    return {
        name: attention.logit_scale.detach().clamp(max=math.log(100)).exp().flatten().tolist()
        for name, attention in window_attentions(model)
    }


# ------------------------------------------------------------------- augmentation (on the device)


def random_crop_flip(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Shift each image by up to ``padding`` pixels (mirrored edges) and flip half of them.

    images (n, 3, s, s) -> (n, 3, s, s), same dtype. One gather does both: rows and columns are
    index vectors, and an index outside the image is reflected back into it.
    """
    n, _, size, _ = images.shape
    device = images.device
    steps = torch.arange(size, device=device)
    shift = torch.randint(-padding, padding + 1, (2, n, 1), device=device, generator=generator)
    rows, columns = ((size - 1) - ((size - 1) - (steps + shift).abs()).abs()).unbind(0)
    flip = torch.rand(n, 1, device=device, generator=generator) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    sample = torch.arange(n, device=device).view(n, 1, 1)
    gathered = images.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]]
    return gathered.permute(0, 3, 1, 2)


def random_erase(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Fill a box (sides a quarter to a half) with the mean colour, in some of the images.

    images float (n, 3, s, s), values 0..255 -> the same shape.
    """
    n, _, size, _ = images.shape
    device = images.device

    def uniform() -> Tensor:
        return torch.rand(n, 1, device=device, generator=generator)

    steps = torch.arange(size, device=device)
    inside = []
    for _ in range(2):
        length = size * (0.25 + 0.25 * uniform())
        start = uniform() * (size - length)
        inside.append((steps >= start) & (steps < start + length))
    box = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    box = box & (uniform() < probability).view(n, 1, 1, 1)
    mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1) * 255
    return torch.where(box, mean, images)


def mix(images: Tensor, targets: Tensor, alpha: float, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Mixup or cutmix of each image with its neighbour in the batch, by a coin toss.

    images float (n, 3, s, s) and targets (n, classes) -> the same shapes. The neighbour is as good
    as any other image since batches are shuffled. ``rng`` lives on the host: its numbers steer
    slices, and a generator on the device would force a wait for each.
    """
    other_images, other_targets = images.roll(1, 0), targets.roll(1, 0)
    if rng.random() < 0.5:
        share = rng.betavariate(alpha, alpha)
        return images.lerp(other_images, 1 - share), targets.lerp(other_targets, 1 - share)
    size = images.shape[-1]
    side = max(1, round(size * math.sqrt(1 - rng.random())))
    top, left = rng.randint(0, size - side), rng.randint(0, size - side)
    images = images.clone()
    box = (..., slice(top, top + side), slice(left, left + side))
    images[box] = other_images[box]
    return images, targets.lerp(other_targets, (side / size) ** 2)


class BatchSource:
    """Augmented batches from uint8 images (n, 3, 32, 32) and labels (n,) kept on a device."""

    def __init__(self, images: Tensor, labels: Tensor, hyper: Hyperparameters, seed: int) -> None:
        self.images, self.labels, self.hyper = images, labels, hyper
        self.generator = torch.Generator(images.device).manual_seed(seed)
        self.rng = random.Random(seed)
        self.indices = self._shuffled_indices()

    def _shuffled_indices(self) -> Iterator[Tensor]:
        """Index vectors (batch,), epoch after epoch; an epoch's ragged rest is left out."""
        n, batch = len(self.labels), self.hyper.batch
        while True:
            order = torch.randperm(n, device=self.images.device, generator=self.generator)
            yield from order[: n - n % batch].split(batch)

    def next(self, mixing: bool) -> tuple[Tensor, Tensor]:
        """One batch: model input (batch, 3, 64, 64) and soft targets (batch, classes)."""
        hyper, index = self.hyper, next(self.indices)
        images = random_crop_flip(self.images[index], hyper.crop_padding, self.generator).float()
        targets = F.one_hot(self.labels[index], len(CLASS_NAMES)).float()
        targets = targets * (1 - hyper.label_smoothing) + hyper.label_smoothing / len(CLASS_NAMES)
        if mixing and self.rng.random() < hyper.mix_probability:
            images, targets = mix(images, targets, hyper.mixup_alpha, self.rng)
        images = random_erase(images, hyper.erase_probability, self.generator)
        # One memory layout whatever the augmentation did: another one would mean recompiling.
        return to_model_input(images).contiguous(), targets


# ---------------------------------------------------------------------------------------- training


def learning_rate(step: int, steps: int, hyper: Hyperparameters) -> float:
    """Linear warm-up, then a cosine down to zero at the last step."""
    warmup = max(1, round(hyper.warmup * steps))
    if step < warmup:
        return hyper.lr * (step + 1) / warmup
    return hyper.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def make_optimizer(model: nn.Module, hyper: Hyperparameters) -> torch.optim.AdamW:
    """AdamW without decay on vectors and on what timm exempts (bias networks, logit scales)."""
    exempt: set[str] = set(model.no_weight_decay())
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        no_decay = parameter.ndim <= 1 or any(part in name for part in exempt)
        (free if no_decay else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": hyper.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=hyper.lr, betas=hyper.betas, fused=True)


class Trainer:
    """A model, its running average, its optimizer and its data; ``step`` makes one update."""

    def __init__(
        self, model: nn.Module, forward: Callable[[Tensor], Tensor], source: BatchSource, steps: int
    ) -> None:
        self.model, self.forward, self.source, self.steps = model, forward, source, steps
        self.hyper = source.hyper
        self.optimizer = make_optimizer(model, self.hyper)
        self.average = copy.deepcopy(model).requires_grad_(False).eval()
        self.device = source.images.device

    def step(self, number: int) -> Tensor:
        """Update the weights once; returns the loss, still on the device so that nothing waits."""
        lr = learning_rate(number, self.steps, self.hyper)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = self.source.next(number < self.steps * (1 - self.hyper.unmixed_tail))
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.forward(inputs)
            loss = self.loss(inputs, logits.float(), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.hyper.clip_grad)
        self.optimizer.step()
        self._update_average(number)
        return loss.detach()

    def loss(self, inputs: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        """Of a batch: inputs (batch, 3, 64, 64), logits and soft targets (batch, classes)."""
        return F.cross_entropy(logits, targets)

    @torch.no_grad()
    def _update_average(self, number: int) -> None:
        """Move the average towards the weights; young averages move faster to forget the start."""
        decay = min(self.hyper.ema_decay, (1 + number) / (10 + number))
        torch._foreach_lerp_(
            list(self.average.parameters()), list(self.model.parameters()), 1 - decay
        )


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue, so that a clock reads finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_step(
    model: nn.Module, forward: Callable[[Tensor], Tensor], source: BatchSource
) -> tuple[float, float]:
    """Seconds of the first steps (compilation) and of one later step; the weights come back."""
    initial = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, forward, source, steps=1000)
    started = time.perf_counter()
    for number in range(3):
        trainer.step(number)
    synchronize(trainer.device)
    compiled = time.perf_counter()
    for number in range(3, 3 + CALIBRATION_STEPS):
        trainer.step(number)
    synchronize(trainer.device)
    seconds = (time.perf_counter() - compiled) / CALIBRATION_STEPS
    model.load_state_dict(initial)
    return compiled - started, seconds


def train(trainer: Trainer, test: tuple[Tensor, Tensor]) -> None:
    """Run the whole schedule, with a line of progress now and then."""
    started = time.perf_counter()
    quarters = {round(trainer.steps * i / 4) for i in (1, 2, 3)}
    for number in range(trainer.steps):
        loss = trainer.step(number)
        done = number + 1
        if done % LOG_EVERY == 0 or done == trainer.steps:
            value = loss.item()
            if not math.isfinite(value):
                raise RuntimeError(f"the loss is {value} at step {done}")
            seconds = time.perf_counter() - started
            print(f"step {done}/{trainer.steps}  loss {value:.3f}  {seconds:.0f} s", flush=True)
        if done in quarters:
            top1, top5 = accuracy(trainer.average, *test)
            print(f"step {done}  test top-1 {top1:.2f}  top-5 {top5:.2f}", flush=True)


@torch.inference_mode()
def accuracy(
    model: nn.Module, images: Tensor, labels: Tensor, batch: int = 500
) -> tuple[float, float]:
    """Top-1 and top-5 in percent, in float32, of images uint8 (n, 3, 32, 32) and labels (n,)."""
    model.eval()
    hits = torch.zeros(2, device=labels.device)
    for some_images, some_labels in zip(images.split(batch), labels.split(batch), strict=True):
        ranked = model(to_model_input(some_images)).topk(5, dim=1).indices
        right = ranked == some_labels[:, None]
        hits += torch.stack([right[:, 0].sum(), right.any(dim=1).sum()])
    top1, top5 = (100 * hits / len(labels)).tolist()
    return round(top1, 2), round(top5, 2)


# ------------------------------------------------------------------------------------------ output


def timm_config(model: nn.Module) -> dict[str, Any]:
    """The content of ``config.json`` in the layout that timm reads from a folder or a hub."""
    return {
        "architecture": ARCHITECTURE,
        "num_classes": len(CLASS_NAMES),
        "num_features": model.num_features,
        "global_pool": "avg",
        "model_args": {"num_classes": len(CLASS_NAMES), **MODEL_ARGS},
        "pretrained_cfg": {
            "tag": "cifar10",
            "custom_load": False,
            "input_size": [3, INPUT_SIZE, INPUT_SIZE],
            "fixed_input_size": True,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(MEAN),
            "std": list(STD),
            "num_classes": len(CLASS_NAMES),
            "label_names": list(CLASS_NAMES),
            "pool_size": [8, 8],
            "first_conv": "patch_embed.proj",
            "classifier": "head.fc",
            "license": "mit",
        },
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_checkpoint(model: nn.Module, folder: Path) -> Path:
    """Write ``config.json`` and ``model.safetensors`` (fp16); returns the latter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    write_json(folder / "config.json", timm_config(model))
    return path


def load_checkpoint(path: Path, device: torch.device) -> nn.Module:
    """A fresh float32 model with the weights of a saved file."""
    model = build_model()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    return model.to(device).eval()


def describe_device(device: torch.device) -> str:
    """The card's name, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# -------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with the two cifar10_*_jpgpack.npz files")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=7.0, help="time up to the saved file")
    length.add_argument("--epochs", type=int, help="fixed length in epochs")
    length.add_argument("--steps", type=int, help="fixed length in steps")
    parser.add_argument("--batch", type=int, default=Hyperparameters.batch)
    parser.add_argument("--lr", type=float, default=Hyperparameters.lr)
    parser.add_argument("--drop-path", type=float, default=Hyperparameters.drop_path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="torch.compile the model (default: on a GPU)",
    )
    parser.add_argument("--test-images", type=int, help="test on the first N only (smoke check)")
    return parser.parse_args()


def choose_steps(
    args: argparse.Namespace, trainer_parts: tuple[nn.Module, Callable, BatchSource], started: float
) -> tuple[int, float]:
    """The number of steps and the seconds that compilation took (0 when it was not measured)."""
    steps_per_epoch = len(trainer_parts[2].labels) // args.batch
    if args.steps is not None:
        return args.steps, 0.0
    if args.epochs is not None:
        return args.epochs * steps_per_epoch, 0.0
    compile_seconds, step_seconds = measure_step(*trainer_parts)
    left = 60 * args.minutes - (time.perf_counter() - started) - RESERVE_SECONDS
    # 3 % slack, because a card that gets hot slows down a little.
    steps = max(1, int(0.97 * left / step_seconds))
    print(
        f"first steps {compile_seconds:.1f} s, then {1000 * step_seconds:.1f} ms a step:"
        f" {steps} steps ({steps / steps_per_epoch:.1f} epochs) fit",
        flush=True,
    )
    return steps, compile_seconds


def main() -> None:
    """Train, save, and only then measure what the saved file is worth."""
    started = time.perf_counter()
    args = parse_arguments()
    # Accuracies are meant to be those of float32, and training autocasts what may be rounded.
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.device)
    hyper = Hyperparameters(batch=args.batch, lr=args.lr, drop_path=args.drop_path)
    train_images, train_labels = (t.to(device) for t in load_split(args.data, "train"))
    test = tuple(t[: args.test_images].to(device) for t in load_split(args.data, "test"))
    print(f"data read in {time.perf_counter() - started:.1f} s, {describe_device(device)}")

    torch.manual_seed(args.seed)
    model = build_model(hyper.drop_path).to(device).train()
    keep_bias_in_float32(model)
    parameters = sum(p.numel() for p in model.parameters())
    forward: Callable[[Tensor], Tensor] = torch.compile(model) if args.compile else model

    def fresh_source() -> BatchSource:
        return BatchSource(train_images, train_labels, hyper, args.seed)

    steps, compile_seconds = choose_steps(args, (model, forward, fresh_source()), started)
    # Seeded anew, so that the result depends on the number of steps but not on the measurement.
    torch.manual_seed(args.seed)
    trainer = Trainer(model, forward, fresh_source(), steps)
    training_started = time.perf_counter()
    train(trainer, test)
    train_seconds = time.perf_counter() - training_started
    path = save_checkpoint(trainer.average, args.output)
    print(f"saved {path} after {time.perf_counter() - started:.0f} s", flush=True)

    saved = load_checkpoint(path, device)
    scales = logit_scales(saved)
    every_scale = [scale for heads in scales.values() for scale in heads]
    top1, top5 = accuracy(saved, *test)
    record: dict[str, Any] = {
        "data": "CIFAR-10, JPEG re-coded",
        "card": describe_device(device),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "cuda": torch.version.cuda,
        "seed": args.seed,
        "steps": steps,
        "epochs": round(steps * hyper.batch / len(train_labels), 2),
        "parameters": parameters,
        "hyperparameters": asdict(hyper),
        "compile_seconds": round(compile_seconds, 1),
        "train_seconds": round(train_seconds, 1),
        "wall_seconds": round(time.perf_counter() - started, 1),
        "test_images": len(test[1]),
        "file_bytes": os.path.getsize(path),
        "top1": top1,
        "top5": top5,
        "logit_scale_min": round(min(every_scale), 3),
        "logit_scale_max": round(max(every_scale), 3),
        "logit_scales": {name: [round(s, 3) for s in heads] for name, heads in scales.items()},
    }
    write_json(args.output / "training.json", record)
    record["top1_without_bias"], record["top5_without_bias"] = accuracy(remove_bias(saved), *test)
    record["top1_before_rounding"] = accuracy(trainer.average, *test)[0]
    write_json(args.output / "training.json", record)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
