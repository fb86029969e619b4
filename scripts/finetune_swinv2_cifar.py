"""Train the terms of the converted CIFAR-10 SwinV2 for a few minutes: what the energy took away.

python scripts/finetune_swinv2_cifar.py DATA_FOLDER [--minutes 3] [--device cuda] [--output DIR]

The example is converted at a low energy, where its accuracy suffers, with
``patch_model(train="terms")``. Then the terms alone are trained, and, from the same start, all
weights. They learn what the original says of augmented images, or, with ``--from-labels``, what
these show. As a control the original is trained likewise, from labels, on all weights: what it
gains has nothing to do with terms; --trainings chooses. Accuracies are those of float32 and of the
running average of the weights; converted models are saved, loaded and only then measured. Writes
finetune_swinv2.csv; with --resume the rows that are there stay, and are not made again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from cifar_jpgpack import load_split
from row_file import RowFile
from torch import Tensor, nn
from train_swinv2_cifar import (
    BatchSource,
    Hyperparameters,
    Trainer,
    accuracy,
    describe_device,
    keep_bias_in_float32,
    measure_step,
    train,
)

from flashbias_convert import load_model, patch_model, save_model
from flashbias_convert.checkpoint import open_model
from flashbias_convert.swap import patched_modules

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/swinv2_cifar10/model.safetensors"
COLUMNS = (
    "name", "top1", "top5", "mean_rank", "trained_parameters", "learnt_from", "steps", "batch",
    "lr", "seconds", "energy", "fill", "test_images", "seed", "device", "torch", "timm",
)  # fmt: skip
#: what makes a row the same row, beside what it was trained with
KEY = ("name", "energy", "fill", "batch", "lr", "test_images", "seed", "device")
ORIGINAL, CONVERTED = "original", "converted"
TERMS, ALL, CONTROL = TRAINED = ("terms trained", "all trained", "original, all trained")
Data = tuple[Tensor, Tensor]


class TermTrainer(Trainer):
    """A trainer that decays no factor: a term that is not needed is no reason to shrink others.

    Args:
        model, source, steps: see `Trainer`.
        teacher: whose probabilities are learnt; None: labels are.
    """

    def __init__(
        self, model: nn.Module, source: BatchSource, steps: int, teacher: nn.Module | None
    ) -> None:
        super().__init__(model, model, source, steps)
        self.teacher = teacher
        wanted = [p for p in model.parameters() if p.requires_grad]
        hyper, fused = self.hyper, self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            wanted, lr=hyper.lr, betas=hyper.betas, weight_decay=0.0, fused=fused
        )

    def loss(self, inputs: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        """See `Trainer.loss`."""
        if self.teacher is not None:
            with torch.no_grad():
                targets = self.teacher(inputs).float().softmax(-1)
        return super().loss(inputs, logits, targets)


def converted(args: argparse.Namespace) -> tuple[nn.Module, float]:
    """The example with terms that are parameters, and their mean rank."""
    model = open_model(args.checkpoint).model.to(args.device)
    plan = patch_model(
        model, train="terms", method="svd", energy=args.energy, max_attention_error=1.0,
        fill=args.fill, force_all=True, backend=args.backend,
    )  # fmt: skip
    ranks = [rank for site in plan.patched for rank in site.ranks()]
    return model, sum(ranks) / len(ranks)


def only_terms(model: nn.Module) -> None:
    """Let everything else rest."""
    model.requires_grad_(False)
    for module in patched_modules(model):
        module.score_bias.requires_grad_(True)


def count(model: nn.Module) -> int:
    """How many numbers ask for gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def finetune(
    model: nn.Module,
    source: BatchSource,
    test: Data,
    args: argparse.Namespace,
    teacher: nn.Module | None = None,
) -> tuple[nn.Module, int, float]:
    """The average of the weights after the training, its steps and its seconds."""
    steps = args.steps
    if steps is None:
        _, seconds = measure_step(model, model, source)
        steps = max(1, int(60 * args.minutes / seconds))
    torch.manual_seed(args.seed)
    trainer = TermTrainer(model.train(), source, steps, teacher)
    started = time.perf_counter()
    train(trainer, test)
    return trainer.average, steps, time.perf_counter() - started


def reloaded(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """What a file of it holds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.flashbias.safetensors"
        save_model(model, file, arch=lambda: open_model(args.checkpoint).model)
        return load_model(
            file, arch=lambda: open_model(args.checkpoint).model, device=args.device,
            backend=args.backend,
        )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Data on the device, and what is asked for."""

    args: argparse.Namespace
    data: Data
    test: Data

    def row(self, name: str, model: nn.Module, rank: float | None, **more: Any) -> dict[str, Any]:
        """A row of a model's accuracy."""
        top1, top5 = accuracy(model.eval(), *self.test)
        mean = None if rank is None else round(rank, 1)
        return {"name": name, "top1": top1, "top5": top5, "mean_rank": mean, **more}

    def untrained(self, name: str) -> dict[str, Any]:
        """A row of the original, or of what it is converted to."""
        if name == ORIGINAL:
            return self.row(name, self.original(), None)
        return self.row(name, *converted(self.args))

    def original(self) -> nn.Module:
        """The example as it is."""
        model: nn.Module = open_model(self.args.checkpoint).model.to(self.args.device)
        return model

    def trained(self, name: str) -> dict[str, Any]:
        """Train, and measure what a file of it holds; the control is measured as it is."""
        args, teacher, rank = self.args, None, None
        if name == CONTROL:
            model = self.original()
            keep_bias_in_float32(model)
        else:
            model, rank = converted(args)
            teacher = None if args.from_labels else self.original().eval()
        if name == TERMS:
            only_terms(model)
        wanted = count(model)
        source = BatchSource(*self.data, Hyperparameters(batch=args.batch, lr=args.lr), args.seed)
        average, steps, seconds = finetune(model, source, self.test, args, teacher)
        if name != CONTROL:
            average = reloaded(average, args)
        run = {"trained_parameters": wanted, "steps": steps, "seconds": round(seconds, 1)}
        run["learnt_from"] = "labels" if teacher is None else "original"
        return self.row(name, average, rank, **run)


def setting(args: argparse.Namespace) -> Setting:
    """Read the data."""
    pairs = {"train": args.train_images, "test": args.test_images}
    found = [
        tuple(part[:most].to(args.device) for part in load_split(args.data, name))
        for name, most in pairs.items()
    ]
    return Setting(args, *found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with the two cifar10_*_jpgpack.npz files")
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLE)
    parser.add_argument("--energy", type=float, default=0.9)
    parser.add_argument("--fill", action="store_true", help="ranks as kernels compute them anyway")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each training")
    parser.add_argument("--steps", type=int, help="of each training, instead of --minutes")
    parser.add_argument("--trainings", nargs="*", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--from-labels", action="store_true", help="not from the original")
    parser.add_argument("--batch", type=int, default=Hyperparameters.batch)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-images", type=int, help="train on the first N only")
    parser.add_argument("--test-images", type=int, help="test on the first N only")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    return parser.parse_args()


def main() -> None:
    """Print and write a row per model."""
    args = arguments()
    torch.backends.cudnn.allow_tf32 = False
    facts = {
        "batch": args.batch, "lr": args.lr, "energy": args.energy, "fill": args.fill,
        "test_images": args.test_images or 10_000, "seed": args.seed,
        "device": describe_device(torch.device(args.device)),
        "torch": torch.__version__, "timm": timm.__version__,
    }  # fmt: skip
    path = args.output / "finetune_swinv2.csv"
    table = RowFile(path, COLUMNS, key=KEY, versions=("torch", "timm"), resume=args.resume)
    found = setting(args)
    for name in (ORIGINAL, CONVERTED, *args.trainings):
        if table.find({"name": name, **facts}) is None:
            make = found.trained if name in TRAINED else found.untrained
            print(table.add({**make(name), **facts}), flush=True)


if __name__ == "__main__":
    main()
