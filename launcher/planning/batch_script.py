"""The batch script: the template that is shipped, or the site's own, filled in. Pure but for the shipped template.

A template has these variables, each ready to stand in a shell script as it is:

    run_id    id of the run (or of the sweep)
    version   of launch
    flags     list: what stands after `#SBATCH `, one each
    run_dir   value of the shell variable `run_dir`
    shared    a folder that has to be there before anything runs: the run directory, or that of the sweep
    python    our interpreter, by its absolute path
    command   what the script has to end in, `exec {{ command }}`: the batch side. It uses the variable `run_dir`
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import launcher
from launcher.planning.plan import SbatchFlag, slurm_agent_argv
from launcher.shipped import BATCH_TEMPLATE

VARIABLES = ("run_id", "version", "flags", "run_dir", "shared", "python", "command")
RUN_DIR = '"$run_dir"'


@dataclass(frozen=True, kw_only=True)
class ArrayScript:
    """One script for many runs, one per array task."""

    prefix: str
    """Absolute. The run directory of a task is `PREFIX.INDEX`."""
    offset: int = 0
    """Added to SLURM_ARRAY_TASK_ID: the index of the run, where an array does not begin at 0."""


class TemplateError(Exception):
    """A template cannot be filled in, or leaves out what a job needs. `line`: where, if known (from 1)."""

    def __init__(self, message: str, hint: str = "", *, line: int | None = None) -> None:
        super().__init__(message)
        self.message, self.hint, self.line = message, hint, line


def batch_script(
    template: str | None,
    *,
    run_id: str,
    run_dir: str,
    python: str,
    flags: Iterable[SbatchFlag],
    array: ArrayScript | None = None,
) -> str:
    """The script that is submitted. Raises TemplateError.

    template: the text of a site's own; None = the shipped one. With `array` each task has its own run_dir.
    """
    lines = [sbatch_text(flag) for flag in flags]
    argv = slurm_agent_argv(python, RUN_DIR, "batch")
    command = " ".join(word if word == RUN_DIR else shlex.quote(word) for word in argv)
    values = {
        "run_id": run_id,
        "version": launcher.__version__,
        "flags": lines,
        "run_dir": shlex.quote(run_dir) if array is None else _array_run_dir(array),
        "shared": RUN_DIR if array is None else shlex.quote(array.prefix),
        "python": shlex.quote(python),
        "command": command,
    }
    text = _rendered(shipped_template() if template is None else template, values)
    _check_essentials(text, lines, command)
    return text


@functools.cache
def shipped_template() -> str:
    """Ours: slurm/batch.sh.j2 of the project."""
    return BATCH_TEMPLATE.read_text(encoding="utf-8")


def sbatch_text(flag: SbatchFlag) -> str:
    """What stands after `#SBATCH `. SLURM takes quotes as a shell does, and a `#` in a bare word for a comment."""
    return flag.flag if not flag.value else f"{flag.flag}={shlex.quote(flag.value)}"


def _array_run_dir(array: ArrayScript) -> str:
    return f"{shlex.quote(array.prefix + '.')}$((SLURM_ARRAY_TASK_ID + {array.offset}))"


def _rendered(template: str, values: Mapping[str, object]) -> str:
    from jinja2 import Environment, StrictUndefined, TemplateSyntaxError, UndefinedError
    from jinja2 import TemplateError as JinjaError

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    try:
        return environment.from_string(template).render(values)
    except TemplateSyntaxError as error:
        raise TemplateError(str(error.message), line=error.lineno) from error
    except UndefinedError as error:
        hint = f"a template may use {', '.join(VARIABLES)}"
        raise TemplateError(str(error.message), hint, line=_line_of(error)) from error
    except (JinjaError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Its expressions are Python's.
        raise TemplateError(f"{type(error).__name__}: {error}", line=_line_of(error)) from error


def _line_of(error: BaseException) -> int | None:
    """The line of the template in which jinja2 has failed: it puts the template's frames into the traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _check_essentials(text: str, flags: Sequence[str], command: str) -> None:
    """A script that leaves these out is accepted by SLURM, and then does something else."""
    lines = text.splitlines()
    if not text.startswith("#!"):
        raise TemplateError("the first line is not `#!/bin/bash`", line=1)
    if missing := [flag for flag in flags if f"#SBATCH {flag}" not in lines]:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        hint = "{% for flag in flags %}, #SBATCH {{ flag }} and {% endfor %}, each on a line of its own"
        raise TemplateError(f"the script does not have the flags of the plan: {shown}", hint)
    words = next((number for number, line in enumerate(lines, 1) if _is_code(line)), None)
    late = [number for number, line in enumerate(lines, 1) if line.startswith("#SBATCH") and number > (words or number)]
    if late:
        raise TemplateError("SLURM reads no #SBATCH after the first command", "move the flags up", line=late[0])
    if not any(line.strip().endswith(command) for line in lines if not line.lstrip().startswith("#")):
        raise TemplateError("the script does not start the batch side", "its last line has to be `exec {{ command }}`")
    if not any(line.startswith("run_dir=") for line in lines):
        raise TemplateError("the script does not set the variable `run_dir`", "a line `run_dir={{ run_dir }}`")


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")
