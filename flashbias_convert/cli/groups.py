"""Options that several commands have: each group of them is a dataclass, written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, get_type_hints

from ..errors import UsageError
from .calibration import (
    Calibrating,
    CalibrationOpt,
    CalibrationSamplesOpt,
    MaxOutputErrorOpt,
    calibrating,
)
from .parameters import (
    ArchArgsOpt,
    ArchOpt,
    DebugOpt,
    DiagonalOpt,
    EnergyOpt,
    ExcludeOpt,
    FillOpt,
    ForceAllOpt,
    IncludeOpt,
    JsonOpt,
    MaxAttentionErrorOpt,
    MaxRankOpt,
    Method,
    MethodOpt,
    QuietOpt,
    RecipeOpt,
    TargetOpt,
    TokensOpt,
    VerboseOpt,
)


@dataclass(frozen=True)
class Deciding:
    """How biases become terms, and at which sites."""

    energy: EnergyOpt = 0.99
    method: MethodOpt = Method.auto
    max_rank: MaxRankOpt = None
    max_attention_error: MaxAttentionErrorOpt = 0.25
    include: IncludeOpt = None
    exclude: ExcludeOpt = None
    fill: FillOpt = True
    force_all: ForceAllOpt = False

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `DecomposeOptions`."""
        return {
            "energy": self.energy,
            "method": self.method.value,
            "max_rank": self.max_rank,
            "max_attention_error": self.max_attention_error,
            "fill": self.fill,
            "force_all": self.force_all,
        }

    def sites(self) -> dict[str, Any]:
        """`include` and `exclude`, as tuples of names."""
        return {"include": tuple(self.include or ()), "exclude": tuple(self.exclude or ())}


@dataclass(frozen=True)
class Converting(Deciding):
    """The same for what is written, and planned for a card."""

    diagonal: DiagonalOpt = False
    calibration: CalibrationOpt = None
    calibration_samples: CalibrationSamplesOpt = None
    max_output_error: MaxOutputErrorOpt = None
    target: TargetOpt = None
    tokens: TokensOpt = None

    def options(self) -> dict[str, Any]:
        own = {"target": self.target, "tokens": self.tokens, "diagonal": self.diagonal}
        return {**super().options(), **own}

    def calibrating(self) -> Calibrating | None:
        """See `calibration.calibrating`; by the outputs of the model, and nothing else.

        Raises:
            UsageError: a limit that a calibration does not keep.
        """
        usual = Converting()
        for name in ("energy", "method", "max_attention_error", "diagonal"):
            if self.calibration is not None and getattr(self, name) != getattr(usual, name):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"--calibration goes by the outputs of the model, and not by {option}",
                    f"leave {option} out, or --calibration",
                )
        shared = {"max_rank": self.max_rank, "target": self.target, "tokens": self.tokens}
        given = (self.calibration, self.calibration_samples, self.max_output_error)
        return calibrating(*given, {**shared, **self.sites()})


@dataclass(frozen=True)
class Building:
    """What the model is, where the checkpoint does not say it."""

    recipe: RecipeOpt = None
    arch: ArchOpt = None
    arch_args: ArchArgsOpt = None


@dataclass(frozen=True)
class Speaking:
    """How much is said, and in which form."""

    #: listed after all other options
    last: ClassVar[bool] = True

    json: JsonOpt = False
    debug: DebugOpt = False
    verbose: VerboseOpt = 0
    quiet: QuietOpt = False


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """The command as typer takes it: a parameter that is a group becomes the options in it."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    first: list[Parameter] = []
    last: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            (last if getattr(hints[name], "last", False) else first).extend(_options(hints[name]))
        else:
            first.append(parameter.replace(annotation=hints[name]))

    def run(**given: Any) -> int:
        made = {
            name: group(**{f.name: given.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    run.__name__, run.__doc__, run.__module__ = (
        command.__name__,
        command.__doc__,
        command.__module__,
    )
    parameters = [*first, *last]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    run.__signature__ = Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    return run


def _options(group: type) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = Parameter.POSITIONAL_OR_KEYWORD
    found = []
    for f in fields(group):
        default = Parameter.empty if f.default is MISSING else f.default
        found.append(Parameter(f.name, kind, default=default, annotation=hints[f.name]))
    return found
