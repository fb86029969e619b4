"""The model card of a conversion: what was done to every site, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from ..decompose.decision import HeadDecision
from ..plan import Plan, SitePlan

_README, _BESIDE_A_README = "README.md", "FLASHBIAS.md"
_COLUMNS = (
    "site",
    "N",
    "heads",
    "terms",
    "rank, mean / max",
    "energy, %",
    "logit error, max",
    "logit error, rms",
    "attention error",
    "decision",
)


def card_path(output: Path) -> Path:
    """Where the card of a converted file goes: ``x.flashbias.md`` beside it."""
    return output.with_suffix(".md")


def card_in(folder: Path) -> Path:
    """Where the card goes in a folder: ``README.md``, but one that is there is kept."""
    readme = folder / _README
    return folder / _BESIDE_A_README if readme.exists() else readme


def model_card(plan: Plan, source: str, output: str) -> str:
    """The text of a card.

    Args:
        plan: what was decided, with what was lost.
        source: name of the original.
        output: name of the converted file or folder.
    """
    counts = ", ".join(f"{n} {status}" for status, n in plan.counts().items())
    options = plan.options.to_json()
    chosen = ", ".join(f"{k} {v}" for k, v in options.items() if v is not None and k != "version")
    made_by = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    caller = plan.arch is None or plan.arch.get("library") == "caller"
    return "\n".join(
        [
            "---",
            "library_name: flashbias-convert",
            "tags: [flashbias]",
            "---",
            "",
            f"# {output}",
            "",
            f"`{source}` with its attention converted to FlashBias by flashbias-convert. The",
            "weights are those of the original; every attention module that adds a bias to its",
            "scores also has terms from which a fused kernel adds that bias.",
            "",
            "```python",
            "from flashbias_convert import load_model",
            "",
            f'model = load_model("{output}"{", arch=..." if caller else ""})',
            "```",
            "",
            f"Of {len(plan.sites)} sites: {counts}. What was measured when it was converted:",
            "",
            *_table(plan),
            "",
            "- energy: kept share of the squared singular values of the row-centred bias, of the",
            "  worst head",
            "- logit error: difference to the original bias, rows centred, over all heads",
            "- attention error: total variation distance between the softmax of the bias and of",
            "  its form here, mean over rows, of the worst head",
            "",
            *_warnings(plan),
            f"Options: {chosen}.",
            "",
            f"Made by {made_by}.",
            "",
        ]
    )


def _warnings(plan: Plan) -> list[str]:
    found = [f"- `{site.name}`: {text}" for site in plan.sites for text in site.warnings]
    return ["Warnings:", "", *found, ""] if found else []


def _table(plan: Plan) -> list[str]:
    head = [_row(_COLUMNS), _row(["---", *["---:"] * (len(_COLUMNS) - 2), "---"])]
    return head + [_row(_cells(site)) for site in plan.sites]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(site: SitePlan) -> list[str]:
    ranks = site.ranks()
    decision = site.status if site.status == "patched" else f"{site.status}: {site.reason}"
    size = str(site.n) if site.n == site.m else f"{site.n} x {site.m}"
    return [
        f"`{site.name or '(the model)'}`",
        size if site.n else "",
        str(site.heads or ""),
        ", ".join((*site.terms(), *site.builder_modules())),
        f"{mean(ranks):.1f} / {max(ranks)}" if ranks else "",
        _over(site, min, lambda d: 100 * d.energy, ".3f"),
        _over(site, max, lambda d: d.logit_error_max, ".2g"),
        _over(site, _root_mean_square, lambda d: d.logit_error_rms, ".2g"),
        _over(site, max, lambda d: d.attention_error, ".3f"),
        " ".join(decision.split()),
    ]


def _over(
    site: SitePlan,
    fold: Callable[[list[float]], float],
    of: Callable[[HeadDecision], float],
    form: str,
) -> str:
    values = [of(decision) for decision in site.decisions]
    return format(fold(values), form) if values else ""


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(mean(v * v for v in values))
