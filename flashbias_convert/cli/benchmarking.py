"""What `bench` was asked for, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..options import DecomposeOptions
from .output import Step
from .values import load_recipes, torch_device

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from ..benchmark import BenchmarkReport
    from ..benchmark.files import Pair
    from ..inputs import Inputs


@dataclass(frozen=True)
class Benching:
    """What to measure; the fields are the options of the command line."""

    checkpoint: Path
    original: Path | None
    inputs: str
    batch: int
    tokens: tuple[int, ...]
    seed: int
    dtype: str | None
    device: str | None
    repeats: int | None
    compile: bool
    max_tokens: int | None
    options: DecomposeOptions
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    recipe_files: tuple[Path, ...]
    arch: str | None
    arch_args: Mapping[str, Any]

    def check(self) -> None:
        """Raise UsageError for values that make no sense; imports nothing heavy."""
        numbers = [("batch", self.batch), ("repeats", self.repeats)]
        for option, value in (*numbers, *(("tokens", n) for n in self.tokens)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1, got {value}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise UsageError(f"--max-tokens must be at least 0, got {self.max_tokens}")
        is_function = ":" in self.inputs or self.inputs == "random"
        if not is_function and not Path(self.inputs).exists():
            raise UsageError(f"there are no inputs {self.inputs}", "see --help for what there is")

    def sources(self) -> list[Path]:
        """Files and folders that are read."""
        found = [self.checkpoint, *([] if self.original is None else [self.original])]
        return [*found, *([Path(self.inputs)] if Path(self.inputs).exists() else [])]

    def run(self, progress: Step | None) -> tuple[BenchmarkReport, str, int]:
        """The report, where the models came from, and how many sites could not be converted.

        Args:
            progress: called before each row, and after each site that is decomposed.
        """
        import torch

        from ..benchmark import benchmark_model
        from ..benchmark.files import Choices, load_pair

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        place = torch_device(device)
        dtype = self.dtype or ("bfloat16" if place.type == "cuda" else "float32")
        recipes = load_recipes(self.recipe_files)
        pair = load_pair(
            self.checkpoint,
            original=self.original,
            choices=Choices(self.options, self.include, self.exclude),
            tokens=max(self.tokens, default=None),
            arch=self.arch,
            arch_args=self.arch_args,
            recipes=recipes,
            progress=_decomposing(progress),
        )
        report = benchmark_model(
            pair.original,
            pair.converted,
            self._inputs(pair),
            plan=pair.plan,
            dtype=getattr(torch, dtype),
            device=place,
            repeats=self.repeats,
            compile=self.compile,
            max_tokens=self.max_tokens,
            progress=_measuring(progress),
        )
        failed = 0 if pair.is_file else len(pair.plan.with_status("failed"))
        return report, pair.source, failed

    def _inputs(self, pair: Pair) -> Inputs:
        """One batch per length."""
        from ..inputs import Inputs, read_inputs
        from ..inputs.random_inputs import vocabulary_size

        if self.tokens and vocabulary_size(pair.original) is None:
            name = type(pair.original).__name__
            raise UsageError(f"{name} does not take tokens", "leave out --tokens")
        found = [
            read_inputs(
                pair.original,
                self.inputs,
                samples=self.batch,
                batch=self.batch,
                seed=self.seed,
                tokens=length,
                assets=pair.folder,
            )
            for length in self.tokens or (None,)
        ]
        firsts = [next(iter(each.batches), None) for each in found]
        batches = [batch for batch in firsts if batch is not None]
        notes = dict.fromkeys(note for each in found for note in each.notes)
        return Inputs(batches, found[0].source, (found[0].source, *notes))


def _decomposing(progress: Step | None) -> Step | None:
    if progress is None:
        return None
    # it is told of sites that are done
    return lambda done, total, name: progress(done - 1, total, f"decomposed {name}")


def _measuring(progress: Step | None) -> Step | None:
    if progress is None:
        return None
    return lambda done, total, name: progress(done, total, f"measuring {name}")
