"""The sentence encoder MPNet, original against the converted file: time, memory, embeddings.

python scripts/bench_mpnet.py [FOLDER] [--dtypes float16 bfloat16] [--tiny --device cpu]
python scripts/bench_mpnet.py [FOLDER] --no-times --device cpu --dtypes --output FILE.csv

FOLDER is what scripts/fetch_mpnet.py prints; by default it is looked for where that script puts it,
and without it the weights are random (a base model, its table of biases large enough to matter).
The model is converted as a folder and loaded again. Rows of 512 tokens, 64 at once, are those of
`bench_models.py`: eager and compiled. Cosines are between sentence embeddings (means over the
tokens, of random tokens, one text full and one padded) of the original in float32 and of either
model in each dtype, the smaller of the two texts; they alone are written with --no-times.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_models import add_options, run
from fetch_mpnet import default_folder, find_model
from torch import Tensor, nn
from whole_models.case import ORIGINAL, OURS, Case
from whole_models.given import tokens
from whole_models.writing import Table, machine, summary

from flashbias_convert import load_model
from flashbias_convert.checkpoint import convert_checkpoint

LENGTHS = (16, 128, 384, 512)
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 32, "vocab_size": 97}  # fmt: skip


def original(folder: Path | None, tiny: bool) -> nn.Module:
    """The published model, or one with random weights; in float32, in evaluation mode."""
    if folder is not None:
        # A file in half precision would load in it, and be the truth of its own rounding.
        return transformers.MPNetModel.from_pretrained(folder).float().eval()
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": max(LENGTHS) + 2, **(TINY if tiny else {})}
    model = transformers.MPNetModel(transformers.MPNetConfig(**sizes))
    nn.init.normal_(model.encoder.relative_attention_bias.weight)
    return model.eval()


def stored(folder: Path | None) -> str | None:
    """The dtype of the published weights in their file; None if they are random."""
    if folder is None:
        return None
    model = transformers.MPNetModel.from_pretrained(folder, dtype="auto")
    return str(model.dtype).removeprefix("torch.")


def convert(model: Any, folder: Path) -> Path:
    """The converted folder of a model."""
    model.save_pretrained(folder / "original")
    return convert_checkpoint(folder / "original", folder / "converted").output


def timed(name: str, model: nn.Module, converted: Path, tiny: bool) -> Case:
    """Original and converted file, eager and compiled."""
    batch, n = (2, 16) if tiny else (64, 512)
    config: Any = model.config

    def build(device: torch.device) -> nn.Module:
        twin = transformers.MPNetModel(config)
        twin.load_state_dict(model.state_dict())
        return twin.to(device)

    def inputs(_: Any, __: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        return tokens(n, config.vocab_size)(count, device, dtype)

    def alter(one: nn.Module, _: str) -> nn.Module:
        return load_model(converted, device=next(one.parameters()).device)

    return Case(name, batch, n, (ORIGINAL, OURS), build, inputs, alter, ("eager", "compiled"))


@torch.no_grad()
def embedded(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Sentence embeddings of length 1, in float64."""
    states = model(ids, attention_mask=mask).last_hidden_state.double()
    return nn.functional.normalize((states * mask[..., None]).sum(1), dim=-1)


def cosines(
    model: nn.Module, converted: Path, device: torch.device, dtypes: list[str]
) -> list[dict[str, Any]]:
    """How near embeddings are to those of the original in float32, of either model."""
    found, config = [], model.config
    wide = copy.deepcopy(model).to(device)
    for name in ("float32", *dtypes):
        dtype = getattr(torch, name)
        made = {ORIGINAL: copy.deepcopy(model), OURS: load_model(converted)}
        models = {way: one.to(device, dtype) for way, one in made.items()}
        for n in LENGTHS:
            (ids,), _ = tokens(n, config.vocab_size)(2, device, dtype)
            mask = torch.ones_like(ids)
            mask[1, n // 4 :] = 0
            right = embedded(wide, ids, mask)
            near = {way: (embedded(one, ids, mask) * right).sum(-1) for way, one in models.items()}
            numbers = {way: f"{float(cosine.min()):.9f}" for way, cosine in near.items()}
            found.append({"tokens": n, "dtype": name, **numbers})
            print("cosine", *found[-1].values(), flush=True)
    return found


def main() -> None:
    """Measure, write, and print a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=default_folder())
    parser.add_argument("--dtypes", nargs="*", default=["float16", "bfloat16"])
    parser.add_argument("--no-times", action="store_true", help="embeddings alone")
    add_options(parser, "bench_mpnet.csv")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device, real = (
        torch.device(options.device),
        None if options.tiny else find_model(options.folder),
    )
    weights = "random weights" if real is None else "all-mpnet-base-v2"
    model = original(real, options.tiny)
    with tempfile.TemporaryDirectory() as folder:
        converted = convert(model, Path(folder))
        table = Table(options.output, resume=options.resume)
        for dtype in () if options.no_times else options.dtypes:
            case = timed(f"MPNet, {weights}, {dtype}", model, converted, options.tiny)
            run([case], argparse.Namespace(**{**vars(options), "dtype": dtype}), table)
        near = cosines(model, converted, device, options.dtypes)
    told = {"weights": weights, "stored": stored(real), **machine(device, torch.float32)}
    told |= {"cosines": near, "rows": table.rows}
    options.output.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    if table.rows:
        print(summary(table.rows, ("original", "original-compiled")))


if __name__ == "__main__":
    main()
