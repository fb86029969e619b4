"""Memory on each device for large models that are served on several: by formula, and allocated.

    python scripts/memory_per_device.py                  # minutes, and 4 GB of memory
    python scripts/memory_per_device.py --device cuda    # and what one card says, of 80 GB
    python scripts/memory_per_device.py --device cuda --resume     # that alone, to the same table
    python scripts/memory_per_device.py --device cuda --resume --group 2 8    # and on so many cards
    python scripts/memory_per_device.py --tiny           # seconds; writes nothing without --output

SwinV2-G (3 B parameters; windows of 40 x 40 at 640 pixels), BLOOM-176B, and the 48 blocks of
AlphaFold 3's Pairformer at 1,024 tokens. Weights are counted on the meta device, in bfloat16, by
what each way splits: DDP nothing (and it allocates as much again for gradients when it wraps a
model), FSDP2 everything (and it gathers one block in full, and keeps what belongs to no block
gathered), tensor parallelism the projections of attention. Buffers are on each device. Terms are
made in earnest on the CPU: modules with the real heads, windows and lengths, but thin channels,
which terms do not depend on, are patched, split as `shard_sites` does it, and the bytes of their
storages are counted, for one block of each kind times their number. Of a bias that depends on the
input, terms belong to one call.

With `--device cuda` there are rows of one card as well: models with random weights are loaded
and called there, in bfloat16, one sample at a time, and torch's allocator is asked for what is
held, and for the most while loading and in a call. Of BLOOM-176B that is one layer of the real
size, 70 times, without its embeddings. With `--group` there are rows of models that are split over
several cards, converted: by FSDP2 block by block, and by heads. Where there are fewer cards than
that, one is the first of a group whose others are not there (`on_devices.py`); the column `card`
says so. Their formula is that of weights, buffers and terms. Writes
`scripts/results/memory_per_device.csv`; with `--resume` the rows that are there stay, and only
those are made that a model has none of.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import row_file
import torch
from torch import nn

from flashbias_convert import patch_model
from flashbias_convert.swap import patched_modules
from flashbias_convert.terms import Dense, LowRank, ScoreBias

sys.path.insert(0, str(Path(__file__).resolve().parent / "paper"))
from pairformer_block import Pairformer

RESULTS = Path(__file__).resolve().parent / "results/memory_per_device.csv"
PARTS = (1, 2, 4, 8)
RANK = 64
#: models whose recipes say how heads are split
SPLIT = ("SwinV2-G", "BLOOM-176B")
#: rows of it were measured in whole, with what the allocator adds, and are of no formula
ONE_CARD = "one card"
CARD = ("loading_peak_bytes", "call_peak_bytes", "card")
COLUMNS = ("model", "what", "way", "devices", "formula_bytes", "allocated_bytes", "parameters")


@dataclass(frozen=True)
class Terms:
    """Terms of sites that are alike.

    Attributes:
        bias: of one site.
        count: how many sites.
        formula: their bytes in one site, by the number of heads, as the README has it.
    """

    bias: ScoreBias
    count: int
    formula: Callable[[int], int]


def main() -> int:
    """Write the table; 1 if something else is allocated than the formulas say."""
    options = parser().parse_args()
    on_cuda = options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        print("there is no CUDA card", file=sys.stderr)
        return 2
    output = options.output or (None if options.tiny else RESULTS)
    kept = row_file.read(output) if options.resume and output is not None else []
    rows: list[dict[str, Any]] = []
    for name, make in MODELS.items():
        own = [row for row in kept if row["model"] == name]
        exact = [row for row in own if not row.get("card")]
        on_card = [row for row in own if row["way"] == ONE_CARD]
        of_group = [row for row in own if row.get("card") and row["way"] != ONE_CARD]
        if not exact or (on_cuda and (options.group or not on_card)):
            made = make(options.tiny)
            exact = exact or by_formula(name, made)
            if on_cuda:
                on_card = on_card or measured(name, *made.whole, options.tiny)
                of_group += grouped(name, *made.whole, exact + of_group, options)
        rows += exact + on_card + of_group
    if output is not None:
        columns = (*COLUMNS, *CARD) if any(row.get("card") for row in rows) else COLUMNS
        row_file.write(output, columns, rows)
    for row in rows:
        print({k: v for k, v in row.items() if v != ""}, flush=True)
    exact = [row for row in rows if not row.get("card")]
    wrong = [r for r in exact if str(r["allocated_bytes"]) not in ("", str(r["formula_bytes"]))]
    print(f"{len(wrong)} of {len(rows)} rows differ", *wrong, sep="\n  ")
    return int(bool(wrong))


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument(
        "--group", type=int, nargs="*", default=[], metavar="N", help="measure on N cards, too"
    )
    found.add_argument("--tiny", action="store_true", help="small models, to try this script")
    found.add_argument("--resume", action="store_true", help="keep the rows of the output")
    found.add_argument("--output", type=Path, help=f"default {RESULTS.name}, nothing with --tiny")
    return found


# -- one card ------------------------------------------------------------------------------


def measured(
    name: str, model: nn.Module, blocks: Sequence[nn.Module], tiny: bool
) -> list[dict[str, Any]]:
    """Rows of one card; the formula is that of the weights that were on it."""
    from on_one_card import on_card

    found = []
    for what, (taken, count) in on_card(name, tiny).items():
        whole = model if count == 1 else blocks[0]
        weights = 2 * count * sum(p.numel() for p in whole.parameters())
        made = row(name, what, ONE_CARD, 1, weights, taken.held)
        peaks = (taken.loading, taken.call, torch.cuda.get_device_name())
        found.append(made | dict(zip(CARD, peaks, strict=True)))
    return found


def grouped(
    name: str,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    known: Sequence[dict[str, Any]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Rows of several cards that are not known, with what each holds by formula and in earnest."""
    from on_devices import SPREAD, fits, on_devices
    from on_devices import by_formula as held_by_formula

    outside = 2 * (_count(model) - sum(map(_count, blocks)))
    found = []
    exact = [r for r in known if not r.get("card")]
    there = {(r["way"], int(r["devices"])) for r in known if r.get("card")}
    for spread, parts in itertools.product(SPREAD[name], options.group):
        if (spread.way, parts) in there:
            continue
        formula = held_by_formula(name, spread, parts, exact, outside)
        if not fits(formula, spread):
            print(f"{name}, {spread.way}: {formula / 1e9:.0f} GB on each of {parts} do not fit")
            continue
        taken, cards = on_devices(name, spread, parts, options.tiny, "cuda")
        made = row(name, spread.what, spread.way, parts, formula, taken.held)
        found.append(made | dict(zip(CARD, (taken.loading, taken.call, cards), strict=True)))
        print(found[-1], flush=True)
    return found


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# -- weights -------------------------------------------------------------------------------


def by_formula(name: str, made: Made) -> list[dict[str, Any]]:
    """Rows of a model's weights and terms."""
    most = max(PARTS) if name in SPLIT else 1
    rows = weights(name, *made.whole, made.attends, most)
    for what, terms in made.terms().items():
        rows += split(name, what, terms, most)
    return rows


def weights(
    name: str,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    attention: Callable[[str], bool],
    most: int,
) -> list[dict[str, Any]]:
    """Bytes of bfloat16 weights on each device, from a model on the meta device.

    Args:
        blocks: what FSDP2 gathers, one at a time.
        attention: whether a parameter is one of a projection of attention.
        most: over how many devices heads can be split.
    """
    own = {id(p): (n, p.numel()) for n, p in model.named_parameters()}  # tied ones once
    total = sum(count for _, count in own.values())
    of_blocks = [sum(p.numel() for p in block.parameters()) for block in blocks]
    heads = sum(count for n, count in own.values() if attention(n))
    found = []
    for parts in PARTS:
        # what belongs to no block is gathered in the first call, and stays so
        gathered = max(of_blocks) + total - sum(of_blocks) if parts > 1 else 0
        ways = {
            "DDP": total,
            "FSDP2": -(-total // parts) + gathered,
            "tensor parallel": total - heads + heads // parts,
        }
        if parts > most:
            del ways["tensor parallel"]
        for way, count in ways.items():
            found.append(row(name, "weights", way, parts, 2 * count, "", total))
    found.append(row(name, "gradients of weights", "DDP", 1, 2 * total, ""))
    return [*found, row(name, "buffers", "on each device", 1, buffers(model), "")]


def buffers(model: nn.Module) -> int:
    """Bytes, with those of floating point in bfloat16."""
    return sum(
        b.numel() * (2 if b.is_floating_point() else b.element_size()) for b in model.buffers()
    )


def row(
    name: str, what: str, way: str, parts: int, formula: int, allocated: Any, parameters: Any = ""
) -> dict[str, Any]:
    """A row of the table."""
    values = (name, what, way, parts, formula, allocated, parameters)
    return dict(zip(COLUMNS, values, strict=True))


# -- terms ---------------------------------------------------------------------------------


def split(name: str, what: str, kinds: list[Terms], most: int) -> list[dict[str, Any]]:
    """Bytes of terms where heads are split over devices; DDP and FSDP2 have those of one."""
    found = []
    for parts in (count for count in PARTS if count <= most):
        formula = sum(t.count * t.formula(t.bias.num_heads // parts) for t in kinds)
        made = sum(t.count * allocated(share(t.bias, parts)) for t in kinds)
        found.append(row(name, what, "heads split", parts, formula, made))
    return found


def share(bias: ScoreBias, parts: int) -> ScoreBias:
    """What the first of some processes keeps, as `shard_sites` does it."""
    return bias.select_heads(range(bias.num_heads // parts))


def allocated(bias: ScoreBias) -> int:
    """Bytes of the storages of its tensors, each once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in bias.named_tensors()
    }
    return sum(storage.nbytes() for storage in storages.values())


# -- models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A model.

    Attributes:
        whole: it, on the meta device, and what FSDP2 gathers, one at a time.
        attends: whether a parameter is one of a projection of attention.
        terms: makes the terms of its sites, by what they are, in minutes.
    """

    whole: tuple[nn.Module, list[nn.Module]]
    attends: Callable[[str], bool]
    terms: Callable[[], dict[str, list[Terms]]]


SWIN_HEADS, SWIN_DEPTHS = (16, 32, 64, 128), (2, 2, 42, 4)


def swin_g(tiny: bool = False) -> Made:
    """SwinV2-G: C = 512, layers 2, 2, 42, 4 (Liu et al., 2022, section 4.1)."""
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    with torch.device("meta"):
        model = SwinTransformerV2(
            embed_dim=64 if tiny else 512, depths=SWIN_DEPTHS, **_swin_sizes(tiny)
        )
    blocks = [block for layer in model.layers for block in layer.blocks]

    def attends(name: str) -> bool:
        return ".qkv." in name or ".attn.proj." in name

    return Made((model, blocks), attends, lambda: _swin_terms(tiny))


def _swin_sizes(tiny: bool) -> dict[str, Any]:
    heads, side, image = ((8, 8, 8, 8), 4, 64) if tiny else (SWIN_HEADS, 40, 640)
    return {"img_size": image, "window_size": side, "num_heads": heads}


def _swin_terms(tiny: bool) -> dict[str, list[Terms]]:
    """Two blocks of each stage, without and with shifted windows."""
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    sizes = _swin_sizes(tiny)
    side, image = sizes["window_size"], sizes["img_size"]
    thin = SwinTransformerV2(embed_dim=128, depths=(2, 2, 2, 2), **sizes).eval()
    patch_model(thin, method="exact", force_all=True)
    names = dict(thin.named_modules())
    exact, ranks = [], []
    for stage, depth in enumerate(SWIN_DEPTHS):
        for at in (0, 1):
            block: Any = names[f"layers.{stage}.blocks.{at}"]
            bias: ScoreBias = block.attn.score_bias.bias
            window = min(side, image // 4 // 2**stage)  # the last stage has no more tokens
            n, offsets = window**2, (2 * window - 1) ** 2
            windows = (image // 4 // 2**stage // window) ** 2
            ids = 4 * windows * n if windows > 1 and at else 0
            exact.append(
                Terms(bias, depth // 2, lambda h, t=offsets, n=n, i=ids: 4 * (h * t + 2 * n) + i)
            )
            masks = tuple(t for t in bias.terms if t.kind == "regions")
            phi_q, phi_k = (torch.randn(bias.num_heads, n, RANK) for _ in range(2))
            low = ScoreBias((LowRank(phi_q=phi_q, phi_k=phi_k), *masks), bias.num_heads)
            ranks.append(Terms(low, depth // 2, lambda h, n=n, i=ids: 4 * h * RANK * 2 * n + i))
    return {"terms, exact": exact, f"terms, rank {RANK}": ranks}


def bloom_176b(tiny: bool = False) -> Made:
    """BLOOM-176B: 70 layers, 112 heads of 128."""
    from transformers import BloomConfig, BloomForCausalLM

    hidden, vocabulary = (448, 1024) if tiny else (14336, 250880)
    config = BloomConfig(hidden_size=hidden, n_layer=70, n_head=112, vocab_size=vocabulary)
    with torch.device("meta"):
        model = BloomForCausalLM(config)

    def terms() -> dict[str, list[Terms]]:
        thin = BloomForCausalLM(BloomConfig(hidden_size=224, n_layer=1, n_head=112, vocab_size=64))
        patch_model(thin.eval(), backend="eager")
        (site,) = patched_modules(thin)
        return {"terms, ALiBi": [Terms(site.score_bias.bias, 70, lambda h: 4 * h)]}

    blocks = list(model.transformer.h)
    return Made((model, blocks), lambda name: ".self_attention." in name, terms)


def pairformer(tiny: bool = False) -> Made:
    """AlphaFold 3's Pairformer: 48 blocks; terms of one call, for one structure."""
    with torch.device("meta"):
        model = nn.ModuleList(Pairformer() for _ in range(48))

    def attends(name: str) -> bool:
        parts = name.split(".")
        attention = {"starting", "ending", "attention"}.intersection(parts)
        return bool(attention) and parts[-2] in ("qkv", "gate", "out")

    tokens = 64 if tiny else 1024
    return Made((model, list(model)), attends, lambda: _pairformer_terms(tokens))


def _pairformer_terms(tokens: int) -> dict[str, list[Terms]]:
    def dense(heads: int) -> ScoreBias:
        term = Dense(bias=torch.zeros(heads, tokens, tokens, dtype=torch.bfloat16))
        return ScoreBias((term,), heads)

    def low(heads: int) -> ScoreBias:
        phi_q, phi_k = (torch.zeros(heads, tokens, RANK) for _ in range(2))
        return ScoreBias((LowRank(phi_q=phi_q, phi_k=phi_k),), heads)

    def of_blocks(
        made: Callable[[int], ScoreBias], blocks: int, formula: Callable[[int], int]
    ) -> list[Terms]:
        return [Terms(made(4), 2 * blocks, formula), Terms(made(16), blocks, formula)]

    def of_matrix(heads: int) -> int:
        return 2 * heads * tokens**2

    def of_factors(heads: int) -> int:
        return 4 * heads * RANK * 2 * tokens

    return {
        "terms, dense, of one block": of_blocks(dense, 1, of_matrix),
        f"terms, rank {RANK}, of one block": of_blocks(low, 1, of_factors),
        f"terms, rank {RANK}, of all blocks": of_blocks(low, 48, of_factors),
    }


#: by name
MODELS = {"SwinV2-G": swin_g, "BLOOM-176B": bloom_176b, "Pairformer": pairformer}


if __name__ == "__main__":
    sys.exit(main())
