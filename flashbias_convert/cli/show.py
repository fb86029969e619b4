"""``flashbias-convert show``: what a converted file holds, from its header alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Output
from .parameters import DebugOpt, JsonOpt

if TYPE_CHECKING:
    from ..plan import Plan

ConvertedArg = Annotated[
    Path,
    typer.Argument(
        metavar="CONVERTED",
        help="A converted .safetensors file, or the folder that holds one.",
        show_default=False,
    ),
]


def show(converted: ConvertedArg, json: JsonOpt = False, debug: DebugOpt = False) -> int:
    """Show what a converted checkpoint holds; reads no weights."""
    from ..checkpoint import read_plan

    output = Output(as_json=json)
    plan = read_plan(converted)

    def data() -> dict[str, Any]:
        return {"path": str(converted), "counts": plan.counts(), "plan": plan.to_json()}

    from .tables import notes, site_table, summary

    output.result(
        data,
        f"{converted}: {_architecture(plan)}",
        f"made by {', '.join(f'{name} {version}' for name, version in plan.versions.items())}",
        f"options: {_options(plan)}",
        site_table(plan, output.width),
        *notes(plan),
        summary(plan),
    )
    return 0


def _architecture(plan: Plan) -> str:
    if plan.arch is None or plan.arch.get("library") == "caller":
        return "a model that only its maker can build: load_model needs arch="
    return f"{plan.arch.get('library')}:{plan.arch.get('name')}"


def _options(plan: Plan) -> str:
    values = plan.options.to_json()
    return ", ".join(f"{k} {v}" for k, v in values.items() if k != "version" and v is not None)
