"""Perplexity of the ALiBi GPT-2 before and after conversion, by length, from the converted file.

    python scripts/evaluate_alibi_gpt2.py MODEL_FOLDER TEXT_FILE [--lengths N ...] [--output DIR]

The text is the one that the model was trained on; its last tenth is held out. For all lengths and
models the same bytes are predicted, in windows that do not overlap. "converted" is the file that
was written, closed and loaded again. Writes evaluate_alibi_gpt2.json, .csv, .md and .png.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from shakespeare import load_bytes, windows
from torch import Tensor
from torch.nn import functional as F
from train_alibi_gpt2 import describe_device, remove_bias

from flashbias_convert import DecomposeOptions, load_model
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.models.alibi_gpt2 import AlibiGPT2LMHeadModel

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "model", "dtype", "length", "perplexity", "seconds", "memory_mib", "logit_difference",
    "same_next_byte",
)  # fmt: skip
NAMES = ("original", "converted", "no bias")
DTYPES = (torch.float32, torch.bfloat16)
#: bytes that go through a model at once, in as many windows as that takes
BYTES_AT_ONCE = 8192
REPEATS = 3


def short(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def significant(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")


# -- models --------------------------------------------------------------------------------


def original_model(args: argparse.Namespace, dtype: torch.dtype) -> AlibiGPT2LMHeadModel:
    """The model as transformers loads it, on the device."""
    model = AlibiGPT2LMHeadModel.from_pretrained(args.model, dtype=dtype)
    return model.to(args.device).eval()


def convert(args: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Write the converted folder; what was decided, and how long it took."""
    options = DecomposeOptions(tokens=max(args.lengths))
    start = time.perf_counter()
    plan = convert_checkpoint(args.model, output, options=options, device=args.device).plan
    seconds = time.perf_counter() - start
    sizes = [sum(f.stat().st_size for f in folder.glob("*.safetensors"))
             for folder in (args.model, output)]  # fmt: skip
    return {
        "seconds": round(seconds, 2),
        "sites": {site.name: "+".join(site.terms()) for site in plan.patched},
        "original_bytes": sizes[0],
        "converted_bytes": sizes[1],
    }


# -- perplexity ----------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue, so that a clock reads finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def logits_of(model: Any, inputs: Tensor) -> Tensor:
    """Logits (windows, length, 256) of inputs (windows, length), a few windows at a time."""
    at_once = max(1, BYTES_AT_ONCE // inputs.shape[1])
    return torch.cat([model(x, use_cache=False).logits for x in inputs.split(at_once)])


def timed(model: Any, inputs: Tensor) -> tuple[Tensor, float, float | None]:
    """Logits, the median seconds for them, and the peak MiB on top of the weights (on a card)."""
    device = inputs.device
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    # the first part alone: also a warm-up, and the peak without what is collected
    logits_of(model, inputs[: max(1, BYTES_AT_ONCE // inputs.shape[1])])
    memory = None
    if device.type == "cuda":
        memory = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    seconds = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        logits = logits_of(model, inputs)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return logits, sorted(seconds)[REPEATS // 2], memory


def perplexity(logits: Tensor, targets: Tensor) -> float:
    """exp of the mean loss per byte, summed in float64."""
    total = 0.0
    for some, wanted in zip(logits.split(8), targets.split(8), strict=True):
        losses = F.cross_entropy(some.float().flatten(0, 1), wanted.flatten(), reduction="none")
        total += losses.double().sum().item()
    return math.exp(total / targets.numel())


def compare(logits: Tensor, original: Tensor) -> dict[str, float]:
    """How logits differ from the original's, and how often the next byte is the same, percent."""
    largest, same = 0.0, 0
    for some, before in zip(logits.split(8), original.split(8), strict=True):
        largest = max(largest, (some.float() - before.float()).abs().max().item())
        same += int((some.argmax(-1) == before.argmax(-1)).sum())
    count = original.numel() // original.shape[-1]
    return {
        "logit_difference": significant(largest),
        "same_next_byte": round(100 * same / count, 3),
    }


def predicted(text: Tensor, args: argparse.Namespace) -> int:
    """How many bytes are predicted, at every length the same ones."""
    longest = max(args.lengths)
    total = (min(len(text), args.limit) - 1) // longest * longest
    if total < 1 or any(longest % length for length in args.lengths):
        raise SystemExit("--lengths must divide the longest, and the held-out text be longer")
    return total


def rows(folder: Path, dtype: torch.dtype, text: Tensor, args: argparse.Namespace) -> list[Any]:
    """One row per model and length."""
    original = original_model(args, dtype)
    models = {
        "original": original,
        "converted": load_model(folder, device=args.device, dtype=dtype),
        "no bias": remove_bias(original),
    }
    total = predicted(text, args)
    found = []
    for length in args.lengths:
        inputs, targets = windows(text, length, total)
        before = None
        for name in NAMES:
            logits, seconds, memory = timed(models[name], inputs)
            before = logits if before is None else before
            found.append({
                "model": name, "dtype": short(dtype), "length": length,
                "perplexity": round(perplexity(logits, targets), 4),
                "seconds": float(f"{seconds:.4g}"),
                "memory_mib": None if memory is None else round(memory, 1),
                **compare(logits, before),
            })  # fmt: skip
            print(found[-1], flush=True)
    return found


# -- rounding and generation ---------------------------------------------------------------


def rounding(folder: Path, text: Tensor, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both models against the original in float64, on one window."""
    inputs = text[None, : args.rounding_length]
    truth = logits_of(original_model(args, torch.float64), inputs)
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        row: dict[str, Any] = {"dtype": short(dtype)}
        for name in ("original", "converted"):
            model: Any = (original_model(args, dtype) if name == "original"
                          else load_model(folder, device=args.device, dtype=dtype))  # fmt: skip
            logits = logits_of(model, inputs).double()
            error = logits - truth
            row[f"{name}_max"] = significant(error.abs().max().item())
            row[f"{name}_rms"] = significant(error.square().mean().sqrt().item())
            same = (logits.argmax(-1) == truth.argmax(-1)).double().mean().item()
            row[f"{name}_same_next_byte"] = round(100 * same, 3)
        found.append(row)
        print(row, flush=True)
    return found


def generation(folder: Path, text: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy continuations of prompts of several lengths, padded on the left, in float32."""
    new = args.new_bytes
    lengths = [args.prompt // 8, args.prompt // 3, args.prompt // 2, args.prompt]
    prompts = torch.zeros(len(lengths), args.prompt, dtype=torch.long, device=text.device)
    for i, length in enumerate(lengths):
        start = i * (len(text) - args.prompt) // len(lengths)
        prompts[i, args.prompt - length :] = text[start : start + length]
    mask = (prompts != 0).long()  # no text holds a zero byte
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0,
    }  # fmt: skip
    original = original_model(args, torch.float32)
    converted: Any = load_model(folder, device=args.device, dtype=torch.float32)
    with torch.inference_mode():
        before, after = (m.generate(prompts, **options)[:, args.prompt :]
                         for m in (original, converted))  # fmt: skip
    same = (before == after).long().cumprod(-1).sum(-1).tolist()
    result = {
        "prompt_lengths": lengths,
        "new_bytes": new,
        "same_bytes": same,
        "equal": all(count == new for count in same),
        "texts": [bytes(row.tolist()).decode("utf-8", "replace") for row in after],
    }
    print({k: v for k, v in result.items() if k != "texts"}, flush=True)
    return result


# -- output --------------------------------------------------------------------------------


def markdown(result: dict[str, Any]) -> str:
    """The tables of the README."""
    lines = [
        "| model | dtype | length | perplexity per byte | largest logit difference | "
        "same next byte | seconds | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        memory = "" if row["memory_mib"] is None else f"{row['memory_mib']:,.0f} MiB"
        lines.append(
            f"| {row['model']} | {row['dtype']} | {row['length']:,} | {row['perplexity']:.4f} | "
            f"{row['logit_difference']:g} | {row['same_next_byte']:.3f} % | {row['seconds']:g} | "
            f"{memory} |"
        )
    lines += ["", "| dtype | original's own error, max (rms) | converted, max (rms) | "
              "same next byte as float64: original, converted |", "|---|---|---|---|"]  # fmt: skip
    for row in result["rounding"]:
        lines.append(
            f"| {row['dtype']} | {row['original_max']:g} ({row['original_rms']:g}) | "
            f"{row['converted_max']:g} ({row['converted_rms']:g}) | "
            f"{row['original_same_next_byte']:.3f} %, {row['converted_same_next_byte']:.3f} % |"
        )
    made = result["generation"]
    counts = ", ".join(str(s) for s in made["same_bytes"])
    lines += ["", f"Greedy generation of {made['new_bytes']} bytes after prompts of "
              f"{', '.join(str(n) for n in made['prompt_lengths'])} bytes, padded on the left: "
              f"{counts} of them equal the original's before the first difference."]  # fmt: skip
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], file: Path) -> None:
    """Perplexity by length and, if it was measured, memory by length, in float32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    single = [row for row in result["rows"] if row["dtype"] == short(DTYPES[0])]
    measured = all(row["memory_mib"] is not None for row in single)
    panels = [("perplexity", "perplexity per byte")]
    panels += [("memory_mib", "MiB on top of the weights")] if measured else []
    size = (5.5 * len(panels), 4.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    styles = {"original": ("o", "-"), "converted": ("x", "--"), "no bias": ("s", ":")}
    for axis, (column, label) in zip(axes[0], panels, strict=True):
        for name, (marker, line) in styles.items():
            points = [(row["length"], row[column]) for row in single if row["model"] == name]
            axis.plot(*zip(*points, strict=True), marker=marker, linestyle=line, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(result["lengths"], [f"{n:,}" for n in result["lengths"]])
        axis.axvline(result["trained_length"], color="gray", linewidth=0.8)
        axis.set(xlabel=f"length in bytes (trained with {result['trained_length']})", ylabel=label)
        axis.legend()
    if measured:
        axes[0][1].set_yscale("log")
    figure.savefig(file, dpi=130)


def write(result: dict[str, Any], folder: Path) -> None:
    """JSON, CSV, tables and picture."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "evaluate_alibi_gpt2"
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown(result), encoding="utf-8")
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(result["rows"])
    draw(result, folder / f"{name}.png")


def main() -> None:
    """Convert, measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--limit", type=int, default=10**9, help="bytes of the held-out text")
    parser.add_argument("--rounding-length", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-bytes", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    args = parser.parse_args()
    device = torch.device(args.device)
    text = load_bytes(args.text, "held out").to(device)
    total = predicted(text, args)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "converted"
        conversion = convert(args, folder)
        print(conversion, flush=True)
        found = [row for dtype in DTYPES for row in rows(folder, dtype, text, args)]
        result = {
            "card": describe_device(device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "text": args.text.name,
            "trained_length": original_model(args, torch.float32).config.n_positions,
            "lengths": args.lengths,
            "bytes_predicted": total,
            "bytes_at_once": BYTES_AT_ONCE,
            "conversion": conversion,
            "rows": found,
            "rounding_length": args.rounding_length,
            "rounding": rounding(folder, text, args),
            "generation": generation(folder, text, args),
        }
    write(result, args.output)
    print(markdown(result))


if __name__ == "__main__":
    main()
