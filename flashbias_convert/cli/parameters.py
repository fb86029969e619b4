"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..options import TARGETS

_WHAT = "What to convert"
_MODEL = "Which model"
_OUT = "Output"


class Method(StrEnum):
    """Values of ``--method``."""

    auto = "auto"
    exact = "exact"
    svd = "svd"
    neural = "neural"


class ComputeDtype(StrEnum):
    """Values of ``--dtype``."""

    float32 = "float32"
    float64 = "float64"


CheckpointArg = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A .safetensors .ckpt .pt .pth .bin .mdlus .onnx file, an index of shards, or a "
        "folder.",
        show_default=False,
        readable=False,  # the reader says it better
    ),
]
EnergyOpt = Annotated[
    float,
    typer.Option(
        help="Share of the bias to keep, in (0, 1]: squared singular values of the row-centred "
        "bias. 1 means exact terms only.",
        rich_help_panel=_WHAT,
    ),
]
MethodOpt = Annotated[
    Method,
    typer.Option(
        metavar="<auto|exact|svd>",
        help="How biases become terms. Those that depend on the input: see the command fit.",
        rich_help_panel=_WHAT,
    ),
]
MaxRankOpt = Annotated[
    int | None, typer.Option(help="Cap on the rank of a head.", rich_help_panel=_WHAT)
]
MaxAttentionErrorOpt = Annotated[
    float,
    typer.Option(
        help="Largest accepted change of the softmax of a bias (total variation, 0 to 1).",
        rich_help_panel=_WHAT,
    ),
]
IncludeOpt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Only this site: its name, or re:PATTERN for whole names. Repeatable.",
        rich_help_panel=_WHAT,
        show_default=False,
    ),
]
ExcludeOpt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Not this site; wins over --include. Repeatable.",
        rich_help_panel=_WHAT,
        show_default=False,
    ),
]
FillOpt = Annotated[
    bool,
    typer.Option(
        "--fill/--no-fill",
        help="Raise ranks to what a kernel computes with anyway: more accurate, equally fast.",
        rich_help_panel=_WHAT,
    ),
]
DiagonalOpt = Annotated[
    bool,
    typer.Option(
        "--diagonal",
        metavar="",
        help="Also try low rank plus a diagonal, which takes longer to find.",
        rich_help_panel=_WHAT,
    ),
]
ForceAllOpt = Annotated[
    bool,
    typer.Option(
        "--force-all", help="Also sites that would not get faster.", rich_help_panel=_WHAT
    ),
]
TargetOpt = Annotated[
    str | None,
    typer.Option(
        metavar="CARD",
        help=f"Card class to plan for: {', '.join(TARGETS)}. Until costs are measured per card, "
        "one table serves all.",
        rich_help_panel=_WHAT,
        show_default=False,
    ),
]
TokensOpt = Annotated[
    int | None,
    typer.Option(
        help="Sequence length, for models that leave it open.",
        rich_help_panel=_WHAT,
        show_default=False,
    ),
]
WindowOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Look at the tensors of biases alone, without a model, and take this window, such as "
        "16, 8x16 or 2x6x12, where they do not show theirs (SwinV2).",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
RecipeOpt = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="A Python file with a recipe; it is executed. Repeatable.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
ArchOpt = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="timm:NAME, torchvision:NAME, transformers:CLASS, alibi_gpt2, pangu, or "
        "package.module:function, which is imported.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
ArchArgsOpt = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="Arguments for building the model, such as '{\"img_size\": 32}'.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
DeviceOpt = Annotated[
    str, typer.Option(help="Where biases are decomposed.", rich_help_panel=_MODEL)
]
DtypeOpt = Annotated[
    ComputeDtype | None,
    typer.Option(
        help="In which biases are computed. Default: float32, or float64 where the file holds "
        "float64. Weights are written in the dtypes they came in.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
ReportOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write everything that was decided, as JSON.",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
PlotOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write figures: biases, spectra, ranks, errors. Needs matplotlib.",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
HtmlOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write one page, to look through sites and heads in a browser.",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
JsonOpt = Annotated[
    bool,
    typer.Option("--json", metavar="", help="One JSON object on stdout.", rich_help_panel=_OUT),
]
DebugOpt = Annotated[
    bool, typer.Option("--debug", metavar="", help="Show tracebacks.", rich_help_panel=_OUT)
]
VerboseOpt = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        help="Say more, and the reason of every site; -vv for details.",
        rich_help_panel=_OUT,
        show_default=False,
        metavar="",
    ),
]
QuietOpt = Annotated[
    bool,
    typer.Option("--quiet", "-q", metavar="", help="Say nothing but errors.", rich_help_panel=_OUT),
]
OutputOpt = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="Default: NAME.flashbias.safetensors beside a file, a folder NAME.flashbias beside "
        "a folder.",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
ShardSizeOpt = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Write a folder with files of at most this size, such as 5GB, and an index.",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
LinkOpt = Annotated[
    bool,
    typer.Option(
        "--link",
        help=(
            "Of shards that stay as they are, make hard links instead of copies. They are the "
            "same files: do not edit them."
        ),
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
CardOpt = Annotated[
    bool,
    typer.Option(
        "--card",
        metavar="",
        help="Also write a model card with what was measured: NAME.flashbias.md beside a file, "
        "README.md in a folder (FLASHBIAS.md if it has a README).",
        rich_help_panel=_OUT,
    ),
]
ForceOpt = Annotated[
    bool,
    typer.Option("--force", metavar="", help="Replace an existing output.", rich_help_panel=_OUT),
]
DryRunOpt = Annotated[
    bool,
    typer.Option("--dry-run", metavar="", help="Decide, but write nothing.", rich_help_panel=_OUT),
]
