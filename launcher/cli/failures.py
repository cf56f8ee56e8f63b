"""What a user sees when a command does not work. Never a traceback."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from launcher.errors import ExitCode, LaunchError, Problem, RecipeError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing that say nothing about the file, so it may be standard output."""


def guarded(command: Callable[[], Any], arguments: Sequence[str]) -> int:
    """Call a command and return its exit code, with every failure printed as a user can read it."""
    as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
    try:
        _refuse_bytes(arguments)
        return int(command() or 0)
    except LaunchError as error:
        return show_problems(error.problems, error.exit_code, as_json=as_json)
    except click.ClickException as error:
        return _show_usage(error, arguments, as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has gone (`launch ls | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except Exception as error:  # noqa: BLE001 - the last resort: a user gets a sentence and a file, not a traceback
        problem, code = _unwritable(error) or _explained(error)
        return show_problems([problem], code, as_json=as_json)


def _unwritable(error: Exception) -> tuple[Problem, ExitCode] | None:
    """Standard output is a file on a full disk. What else does not fit there is not tried."""
    if not isinstance(error, OSError) or error.filename is not None or error.errno not in _NO_ROOM:
        return None
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as again:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message = f"standard output cannot be written: {again.strerror}"
        return Problem(where="launch", message=message), ExitCode.REFUSED
    return None


def _explained(error: Exception) -> tuple[Problem, ExitCode]:
    """The two that come of the place where a command is called, whatever it does there; else a fault of ours."""
    if isinstance(error, FileNotFoundError) and _folder_is_gone():
        return Problem(
            where="launch", message="the current folder was deleted", hint="cd to one that is there"
        ), ExitCode.REFUSED
    if isinstance(error, UnicodeEncodeError) and not _is_text(part := error.object[: error.end]):
        return Problem(
            where="launch", message=f"a path is not UTF-8: {part[-60:]!r}", hint="rename it"
        ), ExitCode.REFUSED
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        message = f"no more files can be opened: {error.strerror}"
        return Problem(where="ulimit -n", message=message, hint="ulimit -n 1024"), ExitCode.REFUSED
    return _fault(error), ExitCode.INTERNAL


def _refuse_bytes(arguments: Sequence[str]) -> None:
    """Raise RecipeError for arguments that are no text: plans, records and W&B hold text, and they arrive unchanged."""
    problems = [Problem(where=ascii(each), message="is not UTF-8") for each in arguments if not _is_text(each)]
    if problems:
        raise RecipeError(problems)


def _is_text(argument: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _folder_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib costs an import, and this is the question itself
    except FileNotFoundError:
        return True
    return False


def show_problems(problems: Sequence[Problem], exit_code: ExitCode, *, as_json: bool) -> int:
    """Print problems on standard error, and on request as one JSON line on standard output. Returns the exit code."""
    from launcher import redact

    redactor = redact.own()
    problems = [
        Problem(where=redactor.text(each.where), message=redactor.text(each.message), hint=redactor.text(each.hint))
        for each in problems
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    if as_json:
        listed = [{"where": each.where, "message": each.message, "hint": each.hint} for each in problems]
        try:
            print(json.dumps({"error": {"exit_code": int(exit_code), "problems": listed}}, ensure_ascii=False))
        except OSError as error:  # a full disk, or a reader that has gone: what is wrong stands on standard error
            print(f"launch: standard output cannot be written: {error.strerror}", file=sys.stderr)
    return int(exit_code)


def _show_usage(error: click.ClickException, arguments: Sequence[str], *, as_json: bool) -> int:
    """A mistake in the command line, with the help that says more; for nothing at all, the help itself."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        print(error.format_message(), file=sys.stderr)
        return ExitCode.USAGE
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = (context.command_path if context else "launch").strip()
    hint = f"`{command} --help` shows the usage"
    message = " ".join(error.format_message().split()).replace("a valid integer range", "a whole number")
    script = next((word for word in arguments if word.endswith(".py")), None)
    if isinstance(error, click.NoSuchOption) and command == "launch" and (known := _of_sbatch(error.option_name)):
        message, hint = error.message, known
    elif isinstance(error, click.NoSuchOption) and not set(error.possibilities or ()) - {"--help"}:
        message = error.message  # without "did you mean --help"
        if error.option_name == "-m":
            hint = "`python -m pkg.train` is `module: pkg.train` in a recipe"
        elif script is not None and "--" not in arguments:
            hint = f"arguments of the script stand after `--`: launch {script} -- {error.option_name} ..."
    problem = Problem(where=command, message=message, hint=hint)
    return show_problems([problem], ExitCode.USAGE, as_json=as_json)


def _of_sbatch(option: str) -> str:
    from launcher.recipe.sbatch_options import sbatch_hint

    return sbatch_hint(option)


def _fault(error: Exception) -> Problem:
    import time
    import traceback

    from launcher import redact
    from launcher.runs.find import state_root

    text = redact.own().text("".join(traceback.format_exception(error)))
    path = state_root() / "faults" / f"{time.time_ns()}-{os.getpid()}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        hint = f"the traceback is in {path}; please report it"
    except OSError as second:
        hint = f"its traceback could not be written to {path} ({second.strerror})"
    return Problem(
        where="launch", message=f"this is a fault of the launcher: {type(error).__name__}: {error}", hint=hint
    )
