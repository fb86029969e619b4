"""Imports point one way: cli -> engine -> recipe -> modules -> decompose, attention -> terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import flashbias_convert

PACKAGE = Path(flashbias_convert.__file__).parent
LAYERS = [
    {
        "errors",
        "about",
        "kept",
        "seals",
        "assignment",
        "cost_tables",
        "tracing",
        "hooks",
        "compiler_faults",
        "maps",
    },
    {"relative_positions", "split_layers"},
    {"options"},
    {"terms"},
    {"builder_module", "trained_terms", "built_terms"},
    {"term_tensors", "saved_terms"},
    {"decompose", "attention"},
    {"mask_memo"},
    {"builders", "nn", "pair_memory"},
    {"common_terms"},
    {"models", "modules", "composed"},
    {
        "patched_attention",
        "masks",
        "causal",
        "fallback",
        "window_map",
        "pair_features",
        "pair_projection",
    },
    {"patched_owner", "interface_masks"},
    {
        "causal_owner",
        "windows",
        "handed_index",
        "freshness",
        "encoder_attention",
        "interface_fallback",
    },
    {"recipe", "plan", "swap", "selection", "attention_interface"},
    {"tables", "trial", "no_site", "refused", "pair_attention", "training_plan"},
    {"parallel", "bare", "triangle_attention", "factors_once"},
    {"inspection", "patching", "checkpoint"},
    {"inputs", "views", "huggingface", "shares"},
    {"verification", "probing", "plotting", "report"},
    {"calibration", "benchmark", "fitting", "launch_tuning"},
    {"cli"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
#: rooms of one layer that may use each other
SIDE_BY_SIDE = {
    ("checkpoint", "inspection"),
    ("checkpoint", "patching"),
    ("patching", "inspection"),
    ("plan", "recipe"),
    ("swap", "recipe"),
}


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """(room, room it imports from) for every relative import, also inside functions."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level]
            target = (*base, *(node.module or "").split("."))
            names = [target[0]] if target[0] else [alias.name for alias in node.names]
            yield from ((parts[0], name) for name in names)


def test_imports_point_one_way() -> None:
    upward = set()
    for file in PACKAGE.rglob("*.py"):
        for room, other in imports(file):
            ranked = room in RANK and other in RANK and room != other
            if ranked and RANK[other] >= RANK[room] and (room, other) not in SIDE_BY_SIDE:
                upward.add(f"{file.relative_to(PACKAGE)} imports {other}")
    assert not upward


def test_only_the_command_line_knows_typer_and_rich() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] != "cli":
            text = file.read_text()
            assert "import typer" not in text and "import rich" not in text, file
            assert "from rich" not in text and not re.search(r"\bprint\(", text), file


def test_every_room_has_a_layer() -> None:
    rooms = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms - {"__init__", "__main__"} == set(RANK)
