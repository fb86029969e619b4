"""What the exit code of the program says."""

from __future__ import annotations

from enum import IntEnum

from ..errors import (
    FitError,
    NothingToConvertError,
    UnknownArchitectureError,
    UsageError,
    VerificationError,
)


class ExitCode(IntEnum):
    """Exit codes of every command.

    A checkpoint with NaN or infinity in a bias is FAILED and nothing is written, also where other
    sites are sound: it was damaged before, and whoever knows and wants the rest excludes the
    site. A site that fails in another way stays as it was; the file is written, and the code is
    PARTLY. If no site was converted because those that were tried failed, nothing is written and
    the code is FAILED, not NOTHING: a script may pass over NOTHING, which means that the model is
    fine as it is.
    """

    DONE = 0
    #: a missing, damaged or unsafe file, a full disk, or no site converted because sites failed
    FAILED = 1
    #: a bad option or pattern, an unknown or ambiguous architecture, an output that exists
    USAGE = 2
    #: no site, or all left alone; nothing is written
    NOTHING = 3
    #: the outputs do not agree, or no fit is good enough; nothing is written
    NOT_VERIFIED = 4
    #: some sites failed, or missed what a fit was asked for, and stayed as they were; the file is
    #: written
    PARTLY = 5


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code for an error."""
    if isinstance(error, UsageError | UnknownArchitectureError):
        return ExitCode.USAGE
    if isinstance(error, NothingToConvertError):
        return ExitCode.NOTHING
    if isinstance(error, VerificationError | FitError):
        return ExitCode.NOT_VERIFIED
    return ExitCode.FAILED
