"""Errors that a user can act on. Messages name what was expected, what came, and what to do."""

from __future__ import annotations

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

    What a message quotes may come from a file or from another library: it becomes one printable
    line of bounded length.

    Attributes:
        hint: the next step, one sentence, or an empty string.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(one_line(message))
        self.hint = one_line(hint)

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


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
