"""The program: its commands, the command that may be left out, and what errors look like."""

from __future__ import annotations

import difflib
import inspect as inspect_module
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..errors import FlashBiasError
from .bench import bench
from .completion import insert_default_command, is_completing
from .convert import convert
from .env import env
from .exit_codes import ExitCode, exit_code_of
from .fit import fit
from .inspect import inspect
from .output import print_error, print_json
from .probe import probe
from .recipes import recipes
from .restore import restore
from .show import show
from .tune import tune
from .verify import verify

PROGRAM = "flashbias-convert"
COMMANDS: dict[str, Callable[..., int]] = {
    "convert": convert,
    "inspect": inspect,
    "probe": probe,
    "fit": fit,
    "verify": verify,
    "bench": bench,
    "tune": tune,
    "restore": restore,
    "show": show,
    "recipes": recipes,
    "env": env,
}
#: options of the program itself, which no command follows
_OWN_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")
_INTERRUPTED = 130

_EPILOG = (
    "Exit codes: 0 done, 1 failed, 2 usage, 3 nothing to convert, 4 verification failed or no fit "
    "good enough, 5 done in part (a site failed and stayed as it was)."
)

app = typer.Typer(
    name=PROGRAM,
    help="Convert pretrained models with attention biases to FlashBias attention. "
    "The command convert may be left out: flashbias-convert model.ckpt --energy 0.99",
    epilog=_EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _paragraphs(command: Callable[..., int]) -> str:
    """The docstring with a line for each paragraph, which the terminal wraps."""
    text = inspect_module.cleandoc(command.__doc__ or "")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


for _name, _command in COMMANDS.items():
    app.command(_name, help=_paragraphs(_command), epilog=_EPILOG)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Say which."
        ),
    ] = False,
) -> None:
    pass


def run(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code and never raises, but for ``--debug``."""
    arguments = _with_command(list(argv))
    try:
        code = int(app(args=arguments, prog_name=PROGRAM, standalone_mode=False) or 0)
        sys.stdout.flush()
        if code == _INTERRUPTED:  # typer makes this of KeyboardInterrupt, and says nothing
            raise KeyboardInterrupt
        return code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted, no output was written")
        return _INTERRUPTED
    except Exception as error:
        return _report(error, arguments)


def _with_command(arguments: list[str]) -> list[str]:
    """Insert ``convert`` where the first argument is no command."""
    if is_completing(PROGRAM):
        insert_default_command("convert", (*COMMANDS, *_OWN_OPTIONS))
        return arguments
    if not arguments:
        return ["--help"]
    if arguments[0] in COMMANDS or arguments[0] in _OWN_OPTIONS:
        return arguments
    return ["convert", *arguments]


def _report(error: Exception, arguments: Sequence[str]) -> int:
    """Say what went wrong: one line and a hint, or a traceback with ``--debug``."""
    if "--debug" in arguments:
        traceback.print_exc()
    message, hint, code = _describe(error, arguments)
    print_error(message, _did_you_mean(arguments) or hint)
    if "--json" in arguments:
        kind = type(error).__name__
        told = {"type": kind, "message": message, "hint": hint}
        found = {"plan": None, **getattr(error, "told", {})}
        print_json({"error": told, "exit_code": int(code), **found})
    return code


def _describe(error: Exception, arguments: Sequence[str]) -> tuple[str, str, ExitCode]:
    if isinstance(error, FlashBiasError):
        return error.message, error.hint, exit_code_of(error)
    if hasattr(error, "format_message"):  # an option that typer refused
        command = f"{arguments[0]} " if arguments and arguments[0] in COMMANDS else ""
        # what pydantic puts before the words of a check of ours
        told = error.format_message().replace("Value error, ", "")
        return told, f"see {PROGRAM} {command}--help", ExitCode.USAGE
    message = f"{type(error).__name__}: {error}"
    return message, "this should not happen; --debug shows where it did", ExitCode.FAILED


def _did_you_mean(arguments: Sequence[str]) -> str:
    """A hint for a command that was mistyped and so taken for a file."""
    if len(arguments) < 2 or arguments[0] != "convert" or Path(arguments[1]).exists():
        return ""
    close = difflib.get_close_matches(arguments[1], COMMANDS, n=1)
    return f"did you mean the command {close[0]!r}?" if close else ""
