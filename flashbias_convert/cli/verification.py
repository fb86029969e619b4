"""What `verify` and `convert --verify` have in common: their options, and the comparison itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from .values import torch_device

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from ..recipe import Recipe
    from ..verification import Verification

#: default number of samples
SAMPLES = 16
PANEL = "Verification"
INPUTS_HELP = (
    "random; a folder of images (one folder per class gives top-1 and top-5); a text (perplexity "
    "for causal language models); an .npz or .safetensors of named inputs; or "
    "package.module:function, called with the model."
)


class CompareDtype(StrEnum):
    """Values of ``--dtype`` and ``--verify-dtype``."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


BatchOpt = Annotated[int, typer.Option(help="How many at once.")]
SeedOpt = Annotated[int, typer.Option(help="Of random inputs, and of the choice of samples.")]
TokenizerOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Holds the tokenizer or the preprocessor_config.json. Default: the folder of the "
        "original; without tokenizer files in it, the bytes of a text are its tokens.",
        show_default=False,
    ),
]
MaxDifferenceOpt = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Largest accepted absolute difference of an output.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
MinAgreementOpt = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Smallest accepted share, 0 to 1, of samples or tokens for which both models choose "
        "the same class or token.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]


VerifyOpt = Annotated[
    bool,
    typer.Option(
        "--verify",
        metavar="",
        help="Compare the converted model with the original; where they do not agree, nothing is "
        "kept and the exit code is 4.",
        rich_help_panel=PANEL,
    ),
]
VerifyInputsOpt = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|random",
        help=INPUTS_HELP,
        rich_help_panel=PANEL,
        show_default="random",
    ),
]
VerifySamplesOpt = Annotated[
    int | None,
    typer.Option(
        help="How many at most.",
        rich_help_panel=PANEL,
        show_default=str(SAMPLES),
    ),
]
VerifyDtypeOpt = Annotated[
    CompareDtype | None,
    typer.Option(
        help="In which to compare.",
        rich_help_panel=PANEL,
        show_default="float32",
    ),
]


@dataclass(frozen=True)
class Comparing:
    """How to compare; the fields are the options of the command line."""

    inputs: str = "random"
    samples: int = SAMPLES
    batch: int = 8
    seed: int = 0
    tokens: int | None = None
    tokenizer: Path | None = None
    dtype: str = "float32"
    device: str = "cpu"
    max_difference: float | None = None
    min_agreement: float | None = None

    def check(self) -> None:
        """Raise UsageError for values that make no sense; imports nothing heavy."""
        for option, value in (("samples", self.samples), ("batch", self.batch)):
            if value < 1:
                raise UsageError(f"{option} must be at least 1, got {value}")
        if self.tokens is not None and self.tokens < 1:
            raise UsageError(f"tokens must be a positive integer, got {self.tokens}")
        if self.max_difference is not None and not self.max_difference >= 0:
            raise UsageError(f"--max-difference must be at least 0, got {self.max_difference}")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise UsageError(f"--min-agreement must be in [0, 1], got {self.min_agreement}")
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            raise UsageError(f"the tokenizer {self.tokenizer} is not a folder")
        is_function = ":" in self.inputs or self.inputs == "random"
        if not is_function and not Path(self.inputs).exists():
            raise UsageError(f"there are no inputs {self.inputs}", "see --help for what there is")

    def run(
        self,
        original: Path,
        converted: Path,
        *,
        arch: Any = None,
        arch_args: Mapping[str, Any] | None = None,
        recipes: Sequence[Recipe] = (),
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Verification:
        """See `verify_files`; `progress` is called with (done, total, "")."""
        import torch

        from ..verification import verify_files

        def advance(done: int) -> None:
            if progress is not None:
                progress(done, max(done, self.samples), "")

        return verify_files(
            original,
            converted,
            inputs=self.inputs,
            samples=self.samples,
            batch=self.batch,
            seed=self.seed,
            tokens=self.tokens,
            assets=self.tokenizer,
            arch=arch,
            arch_args=arch_args,
            recipes=recipes,
            dtype=getattr(torch, self.dtype),
            device=torch_device(self.device),
            max_difference=self.max_difference,
            min_agreement=self.min_agreement,
            progress=advance,
        )


def quiet_libraries(*names: str | None) -> None:
    """Set what libraries read when they are imported, and find modules in the working directory.

    Args:
        *names: what may name a module, such as ``package.module:function``.
    """
    # nothing is ever downloaded, and one bar is enough
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # modules of the working directory can be named, but must not hide installed ones
    named = any(name is not None and ":" in name for name in names)
    if named and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
