"""Errors that a user can act on. Messages name what was expected, what came, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

#: longer messages are cut in the middle
_LONGEST = 1200


def one_line(text: str) -> str:
    """`text` without line breaks, and with escapes for whatever a terminal would obey."""
    words = " ".join(text.split())
    if not words.isprintable():
        words = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    half = _LONGEST // 2
    return words if len(words) <= _LONGEST else f"{words[:half]} ... {words[-half:]}"


class FlashBiasError(Exception):
    """Base of all errors that this package raises on purpose.

    What a message quotes may come from a file or from another library: `str` makes one printable
    line of bounded length of it.

    Args:
        message: what was expected, and what came.
        hint: the next step, one sentence, or an empty string.
    """

    if TYPE_CHECKING:
        # None at run time: torch.compile cannot trace `Exception.__init__`, and where it may not
        # leave its graph (fullgraph=True) it would complain of that, and never say these words.
        def __init__(self, message: str, hint: str = "", /) -> None: ...

    @property
    def message(self) -> str:
        """What `str` says, without the hint."""
        return one_line(str(self.args[0])) if self.args else ""

    @property
    def hint(self) -> str:
        """The next step, one sentence, or an empty string."""
        return one_line(str(self.args[1])) if len(self.args) > 1 else ""

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(FlashBiasError, ValueError):
    """An option or argument that makes no sense, such as energy outside (0, 1]."""


class NothingToConvertError(FlashBiasError):
    """No biased attention site was found, or every one was left alone."""


class DecompositionError(FlashBiasError, ValueError):
    """A bias that cannot be decomposed: NaN, infinity, or a shape that no term fits."""


class NotFiniteError(DecompositionError):
    """NaN or infinity in a bias: the checkpoint is damaged, and not by the conversion."""


class StaleTermsError(FlashBiasError, RuntimeError):
    """The weights or sizes that the terms were made from have changed since."""


class UnsupportedTermError(FlashBiasError, NotImplementedError):
    """A backend was asked by name for something that it cannot add."""


class CheckpointError(FlashBiasError):
    """A file that is missing, damaged, unsafe or not what it claims to be."""


class VerificationError(FlashBiasError):
    """A converted model that does not agree with its original.

    Attributes:
        verification: what was found, a `Verification`; None where nothing was compared.
    """

    def __init__(self, message: str, hint: str = "", verification: object = None) -> None:
        super().__init__(message, hint)
        self.verification = verification


class FitError(FlashBiasError):
    """No fit of factor networks was good enough."""


class UnknownArchitectureError(FlashBiasError):
    """The architecture of a checkpoint is unknown or ambiguous.

    Attributes:
        candidates: architectures that fit, if several do.
    """

    def __init__(self, message: str, hint: str = "", candidates: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.candidates = candidates
