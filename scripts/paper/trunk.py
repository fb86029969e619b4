"""A whole trunk of 48 folding blocks, converted by the command line, saved and loaded again.

python scripts/paper/trunk.py [--blocks 48] [--residues 48] [--device cuda] [--output DIR] [--keep
DIR]

ESMFold of transformers at a small width and with random weights: 48 blocks of triangle attention
and attention with pair bias, 144 sites, twice through the trunk (one recycle), and its structure
module. The folder that transformers saves is converted by `flashbias-convert` in a process of its
own, and what `load_model` makes of the result is compared with the same model patched in memory,
bit for bit, and with the original. Both, original and converted, are held against the original in
float64: of two ways to round, neither should lie more than twice as far from it as the other.
Outputs without any pair bias say how much is at stake.

Writes trunk.csv: a row per output with its largest differences, beside seconds and sizes.
"""

from __future__ import annotations

import argparse
import copy
import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert import load_model, patch_model

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "blocks", "residues", "pair_channels", "single_channels", "sites", "output", "bit_for_bit",
    "error", "original_error", "ratio", "difference", "without_bias", "largest", "save_s",
    "convert_s", "load_s", "original_s", "converted_s", "device", "torch", "transformers",
)  # fmt: skip
#: the file holds what these sites add to their scores
BIASES = ("tri_att_start.linear", "tri_att_end.linear", "pair_to_sequence.linear")


def make_model(blocks: int, pair: int, single: int, head: int = 8) -> Any:
    """ESMFold with random weights, in eval mode.

    Args:
        blocks: of the trunk.
        pair, single: channels; multiples of `head`.
        head: width of a head.
    """
    import transformers

    structure = {
        "sequence_dim": single, "pairwise_dim": pair, "ipa_dim": 4, "resnet_dim": 8,
        "num_heads_ipa": 2, "num_qk_points": 2, "num_v_points": 2, "num_blocks": 2,
        "num_transition_layers": 1, "num_resnet_blocks": 1,
    }  # fmt: skip
    trunk = {
        "num_blocks": blocks, "sequence_state_dim": single, "pairwise_state_dim": pair,
        "sequence_head_width": head, "pairwise_head_width": head, "position_bins": 32,
        "max_recycles": 1, "structure_module": structure,
    }  # fmt: skip
    config = transformers.EsmConfig(
        vocab_size=33, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, is_folding_model=True, token_dropout=True, mask_token_id=32,
        pad_token_id=1, position_embedding_type="rotary",
        esmfold_config={"trunk": trunk, "fp16_esm": False, "lddt_head_hid_dim": 8},
    )  # fmt: skip
    model = transformers.EsmForProteinFolding(config).eval()
    _randomise(model)
    return model


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Blocks that do something: by default their last layers are zero, and so are their biases."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            wide = 2.0 if any(part in name for part in BIASES) else 0.5
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(wide * noise / parameter[0].numel() ** 0.5)


@torch.no_grad()
def run(model: Any, residues: int) -> dict[str, Tensor]:
    """Named outputs for a random sequence and a shorter one, padding left out."""
    draw = torch.Generator().manual_seed(2)
    device = next(model.parameters()).device
    tokens = torch.randint(0, 20, (2, residues), generator=draw).to(device)
    mask = torch.ones_like(tokens)
    mask[1, -(residues // 4) :] = 0
    out = model(tokens, attention_mask=mask, num_recycles=1)
    real = mask.bool()
    pairs = real[:, :, None] & real[:, None]
    return {
        "single representation": out.s_s[real],
        "pair representation": out.s_z[pairs],
        "language model": out.lm_logits[real],
        "positions": out.positions[-1][real],
    }


@torch.no_grad()
def without_bias(model: nn.Module) -> nn.Module:
    """A copy whose pair biases are zero."""
    plain = copy.deepcopy(model)
    for name, parameter in plain.named_parameters():
        if any(part in name for part in BIASES):
            parameter.zero_()
    return plain


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    found = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return found, time.perf_counter() - start


def command(folder: Path, output: Path) -> list[str]:
    """Arguments of the program; a tiny trunk would be left alone without the last one."""
    return [str(folder), "-o", str(output), "--force-all"]


def convert(folder: Path, output: Path) -> None:
    """The program, in a process of its own."""
    program = [sys.executable, "-m", "flashbias_convert", *command(folder, output)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"flashbias-convert ended with {done.returncode}: {done.stderr}")
    print(next(line for line in done.stdout.splitlines() if "sites converted" in line), flush=True)


def compare(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of the table; files go to `folder`."""
    import transformers

    model = make_model(args.blocks, args.pair, args.single).to(args.device)
    facts: dict[str, Any] = {
        "blocks": args.blocks, "residues": args.residues, "pair_channels": args.pair,
        "single_channels": args.single, "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
    }  # fmt: skip
    seconds: dict[str, float] = {}
    plain, seconds["original_s"] = timed(lambda: run(model, args.residues), args.device)
    truth = run(copy.deepcopy(model).double(), args.residues)
    bare = run(without_bias(model), args.residues)
    _, seconds["save_s"] = timed(lambda: model.save_pretrained(folder / "model"), "cpu")
    output = folder / "model.flashbias"
    _, seconds["convert_s"] = timed(lambda: convert(folder / "model", output), "cpu")
    loaded, seconds["load_s"] = timed(lambda: load_model(output, device=args.device), args.device)
    plan = patch_model(model, force_all=True)
    facts["sites"] = len(plan.patched)
    memory = run(model, args.residues)
    found, seconds["converted_s"] = timed(lambda: run(loaded, args.residues), args.device)
    facts |= {name: f"{value:.2f}" for name, value in seconds.items()}
    rows = []
    for name, value in found.items():
        error, own = (largest(x.double() - truth[name]) for x in (value, plain[name]))
        rows.append({
            "output": name, "bit_for_bit": torch.equal(value, memory[name]),
            "error": error, "original_error": own, "ratio": error / own,
            "difference": largest(value - plain[name]),
            "without_bias": largest(bare[name] - plain[name]),
            "largest": largest(truth[name]), **facts,
        })  # fmt: skip
    return rows


def largest(x: Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    return float(x.abs().max())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--residues", type=int, default=48)
    parser.add_argument("--pair", type=int, default=32, help="channels")
    parser.add_argument("--single", type=int, default=64, help="channels")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    parser.add_argument("--keep", type=Path, help="keep the models in this folder")
    return parser.parse_args()


def main() -> None:
    """Convert, compare, print and write."""
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        rows = compare(args, args.keep or Path(temporary))
    with (args.output / "trunk.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(shown)
            print(*(f"{name} {shown[name]}" for name in COLUMNS[4:]), flush=True)
    if not all(row["bit_for_bit"] for row in rows):
        sys.exit("the loaded model computes other bits than the one patched in memory")
    for row in rows:
        # twice what the original's own rounding costs, and one rounding of the largest value
        if not row["error"] <= 2 * row["original_error"] + 2**-23 * row["largest"]:
            sys.exit(f"the converted model is further from float64 than that: {row['output']}")


if __name__ == "__main__":
    main()
