"""Train a small Pangu-Weather model on ERA-Interim in a few minutes and save it as a folder.

    python scripts/train_pangu_era.py DATA.nc --output examples/pangu_era_interim --seconds 220

The task is in ``era_interim.py``: fill in hidden blocks of the fields of January and July. The
output folder gets ``model.safetensors`` (fp16), ``config.json`` and ``training.json``.

As in the published model the position bias is learned as a table of 3,312 entries for each window
type and head, 12 pairs of tokens to an entry along longitude, and saved as the dense matrix that
the model adds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from era_interim import (
    HELD_OUT,
    LONGITUDES,
    MODEL_ARGS,
    VARIABLES,
    Evaluation,
    Normalisation,
    area,
    coarsen,
    fill_in,
    held_out,
    read_fields,
    visible_blocks,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flashbias_convert.errors import FlashBiasError
from flashbias_convert.models.pangu import EarthAttention3D, build, earth_position_index

ROOT = Path(__file__).resolve().parent.parent
LOG_EVERY = 100
BIAS = "earth_specific_bias"
#: Sizes for a check on a CPU.
TINY = {"dims": [16, 16, 16, 16], "heads": [2, 2, 2, 2]}


@dataclass(frozen=True)
class Hyperparameters:
    """Everything that shapes the training besides the data, the seed and the time."""

    batch: int = 16
    lr: float = 2e-3
    bias_lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    bias_decay: float = 0.1
    warmup: float = 0.05
    clip_grad: float = 1.0
    drop_path: float = 0.1
    two_places: float = 0.5
    amplitude: float = 0.3


# ------------------------------------------------------------------------------------- the model


class Table(nn.Module):
    """A dense bias (1, T, H, N, N) as a table (T, H, entries), for `parametrize`."""

    index: Tensor

    def __init__(self, attention: EarthAttention3D) -> None:
        super().__init__()
        index = earth_position_index(attention.window_size)
        cells = torch.zeros(int(index.max()) + 1, dtype=torch.int64)
        cells[index.flatten()] = torch.arange(index.numel())  # one cell of each entry
        device = attention.earth_specific_bias.device
        self.register_buffer("index", index.to(device), persistent=False)
        self.register_buffer("cells", cells.to(device), persistent=False)

    def forward(self, table: Tensor) -> Tensor:
        """The dense bias."""
        return table[..., self.index].unsqueeze(0)

    def right_inverse(self, bias: Tensor) -> Tensor:
        """The table of a dense bias: one cell speaks for all of its entry."""
        return bias[0].flatten(-2)[..., self.cells].contiguous()


def attentions(model: nn.Module) -> list[tuple[str, EarthAttention3D]]:
    """The attention modules with their names, in the order they run."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, EarthAttention3D)]


def clear_biases(model: nn.Module) -> None:
    """Set every bias to zero."""
    for _, attention in attentions(model):
        nn.init.zeros_(attention.earth_specific_bias)


def tie(model: nn.Module) -> None:
    """Learn tables instead of dense biases."""
    for _, attention in attentions(model):
        parametrize.register_parametrization(attention, BIAS, Table(attention), unsafe=True)


def untie(model: nn.Module) -> None:
    """Put the dense biases back, filled from the tables."""
    for _, attention in attentions(model):
        parametrize.remove_parametrizations(attention, BIAS)


# -------------------------------------------------------------------------------------- the data


class Batches:
    """Endless batches: mixed months, turned globes, scaled variables, hidden blocks.

    Args:
        normalised: (month, variable, level, 241, 480).
        hyper: what to do with them.
        device: where batches are made.
        seed: of a generator of their own.
    """

    def __init__(
        self, normalised: Tensor, hyper: Hyperparameters, device: torch.device, seed: int
    ) -> None:
        self.maps = torch.stack([coarsen(normalised, first) for first in (0, 1)]).to(device)
        self.known = ~held_out().to(device)
        self.hyper = hyper
        self.generator = torch.Generator(device).manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Fields (B, variable, level, 120, 480), visible and wanted, bool (B, 120, 480)."""
        while True:
            offset, other = self._integers(LONGITUDES), self._integers(LONGITUDES)
            apart = self._uniform() < self.hyper.two_places
            first, known = self._turned(offset)
            second, also_known = self._turned(torch.where(apart, other, offset))
            share = self._uniform()[:, None, None, None, None]
            fields = share * first + (1 - share) * second
            size = (*fields.shape[:3], 1, 1)
            noise = 2 * torch.rand(size, generator=self.generator, device=fields.device) - 1
            fields = fields * (1 + self.hyper.amplitude * noise)
            in_training = (known & also_known)[:, None, :]
            shown = visible_blocks(len(fields), self.generator)
            yield fields, shown & in_training, ~shown & in_training

    def _turned(self, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Maps of random months turned by `offset` columns, and which columns are known."""
        maps = self.maps[self._integers(2), self._integers(2)]
        columns = (torch.arange(LONGITUDES, device=offset.device) + offset[:, None]) % LONGITUDES
        where = columns[:, None, None, None, :].expand_as(maps)
        return maps.gather(-1, where), self.known[columns]

    def _integers(self, end: int) -> Tensor:
        device = self.generator.device
        return torch.randint(end, (self.hyper.batch,), generator=self.generator, device=device)

    def _uniform(self) -> Tensor:
        device = self.generator.device
        return torch.rand(self.hyper.batch, generator=self.generator, device=device)


# ---------------------------------------------------------------------------------- the training


def make_optimizer(model: nn.Module, hyper: Hyperparameters) -> torch.optim.AdamW:
    """Tables start at zero, must reach logits, and learn from few tokens at a time.

    Adam gives every entry steps of the same size, also those that attention hardly depends on.
    Such entries would wander; decay and a moderate rate keep what is noise small.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    tables = [p for n, p in named if BIAS in n]
    matrices = [p for n, p in named if BIAS not in n and p.dim() > 1]
    vectors = [p for n, p in named if BIAS not in n and p.dim() <= 1]
    decay = hyper.weight_decay
    groups = [
        {"params": tables, "lr": hyper.bias_lr, "weight_decay": hyper.bias_decay},
        {"params": matrices, "lr": hyper.lr, "weight_decay": decay},
        {"params": vectors, "lr": hyper.lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=hyper.betas)


def schedule(progress: float, warmup: float) -> float:
    """Factor on the learning rates: a short linear rise, then half a cosine down to zero."""
    if progress < warmup:
        return progress / warmup
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup)))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], weight: Tensor) -> Tensor:
    """Mean squared error of the hidden points by area, all variables alike."""
    fields, visible, wanted = batch
    device = fields.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        predicted = fill_in(model, fields, visible)
    error = (predicted.float() - fields).square().mean((1, 2))
    weight = weight * wanted
    return (error * weight).sum() / weight.sum()


def train(
    model: nn.Module, batches: Batches, hyper: Hyperparameters, seconds: float, steps: int | None
) -> dict[str, Any]:
    """Train until the time or the steps are over; returns what happened."""
    optimizer = make_optimizer(model, hyper)
    highest = [group["lr"] for group in optimizer.param_groups]
    weight = area().to(batches.maps.device)
    started, step, history = time.perf_counter(), 0, []
    for batch in batches:
        elapsed = time.perf_counter() - started
        progress = step / steps if steps is not None else elapsed / seconds
        if progress >= 1:
            break
        for group, lr in zip(optimizer.param_groups, highest, strict=True):
            group["lr"] = lr * schedule(progress, hyper.warmup)
        loss = loss_of(model, batch, weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), hyper.clip_grad)
        optimizer.step()
        if step % LOG_EVERY == 0 or step + 1 == steps:
            value = loss.item()
            print(f"step {step} ({100 * progress:.0f} %, {elapsed:.0f} s): loss {value:.4f}",
                  flush=True)  # fmt: skip
            if not math.isfinite(value):
                raise SystemExit("the loss is not finite: nothing is saved")
            history.append([step, round(value, 5)])
        step += 1
    return {
        "steps": step,
        "train_seconds": round(time.perf_counter() - started, 1),
        "loss": history,
    }


# ------------------------------------------------------------------------------------ the output


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Readable JSON with a final newline."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def save(model: nn.Module, args: dict[str, Any], norm: Normalisation, folder: Path) -> Path:
    """Write ``config.json`` and ``model.safetensors`` (fp16); returns the latter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: t.detach().cpu().half().contiguous() for k, t in model.state_dict().items()}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    config = {
        "library": "flashbias",
        "architecture": "pangu",
        "args": args,
        "normalisation": norm.to_json(),
    }
    write_json(folder / "config.json", config)
    return path


def errors(evaluation: Evaluation, model: nn.Module) -> dict[str, Any]:
    """Errors in the longitudes that were held out, in standard deviations."""
    found = evaluation.rmse(evaluation.predict(model.eval()))
    return {
        "rmse": round(found.square().mean().sqrt().item(), 5),
        "rmse_by_variable_and_level": {
            name: [round(x, 5) for x in row]
            for name, row in zip(VARIABLES, found.tolist(), strict=True)
        },
    }


def bias_sizes(model: nn.Module) -> dict[str, float]:
    """Standard deviation of the row-centred bias of each attention module."""
    found = {}
    for name, attention in attentions(model):
        bias = attention.earth_specific_bias.detach().float()
        found[name] = round((bias - bias.mean(-1, keepdim=True)).std().item(), 4)
    return found


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="eraint_uvz.nc")
    parser.add_argument("--output", type=Path, default=ROOT / "examples/pangu_era_interim")
    parser.add_argument("--seconds", type=float, default=220, help="time to train for")
    parser.add_argument("--steps", type=int, help="a number of steps instead of --seconds")
    parser.add_argument("--batch", type=int, default=Hyperparameters.batch)
    parser.add_argument("--lr", type=float, default=Hyperparameters.lr)
    parser.add_argument("--bias-lr", type=float, default=Hyperparameters.bias_lr)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="few channels, to check the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, save, and measure what the saved weights are worth."""
    started = time.perf_counter()
    options = parse_arguments()
    device = torch.device(options.device)
    hyper = Hyperparameters(batch=options.batch, lr=options.lr, bias_lr=options.bias_lr)
    fields = read_fields(options.data)
    norm = Normalisation.of(fields)
    normalised = norm.apply(fields)
    torch.manual_seed(options.seed)
    args = {**MODEL_ARGS, **(TINY if options.tiny else {})}
    model = build(**args, drop_path=hyper.drop_path).to(device).train()
    clear_biases(model)
    tie(model)
    batches = Batches(normalised, hyper, device, options.seed)
    record = train(model, batches, hyper, options.seconds, options.steps)
    untie(model)
    path = save(model, args, norm, options.output)
    print(f"saved {path} after {time.perf_counter() - started:.0f} s", flush=True)

    rounded = {name: t.half().float() for name, t in model.state_dict().items()}
    model.load_state_dict(rounded)
    evaluation = Evaluation.of(normalised, device)
    guess = evaluation.rmse(evaluation.zonal_mean())
    record |= {
        "data": "ERA-Interim z, u, v at 200, 500, 850 hPa, means of January and July",
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "seed": options.seed,
        "hyperparameters": asdict(hyper),
        "parameters": sum(p.numel() for p in model.parameters()),
        "file_bytes": path.stat().st_size,
        "held_out_columns": [HELD_OUT.start, HELD_OUT.stop],
        "held_out": errors(evaluation, model),
        "held_out_zonal_mean": round(guess.square().mean().sqrt().item(), 5),
        "bias_std": bias_sizes(model),
    }
    clear_biases(model)
    record["held_out_without_bias"] = errors(evaluation, model)
    write_json(options.output / "training.json", record)
    print(json.dumps({k: v for k, v in record.items() if k != "loss"}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except FlashBiasError as error:
        raise SystemExit(f"error: {error}") from error
