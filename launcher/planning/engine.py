"""Who starts and restarts the workers: our agent, or torchrun below it, by the torch that they have. Pure."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.planning.topology import Finding, Remarks

if TYPE_CHECKING:
    from launcher.planning.facts import Facts

Version = tuple[int, int]

TORCH_FROM: Version = (2, 13)
TORCH_BELOW: Version = (2, 15)
"""The versions of torch whose elastic classes the agent is tested with; those of pyproject.toml."""
OLDEST_TORCH: Version = (2, 4)
OLDEST_PYTHON: Version = (3, 11)

FORCE = "LAUNCH_ENGINE"
"""A variable of the environment: `torchrun` takes it where the agent would do, to compare the two; `agent` insists."""
ENGINES = ("agent", "torchrun")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What supervises the workers."""

    name: str
    reason: str = ""
    """Why it is not the agent."""


def of_workers(facts: Facts) -> Facts:
    """The facts with the interpreter that the workers have in place of our own."""
    found = facts.interpreter
    if found is None:
        return facts if facts.workers_python is None else dataclasses.replace(facts, python=facts.workers_python)
    return dataclasses.replace(
        facts, python=found.path, python_version=found.version, torch_version=found.torch_version
    )


def choose_engine(facts: Facts, *, script: bool, remarks: Remarks, refusals: list[Finding]) -> Engine:
    """The engine for the workers' torch. What cannot run at all goes to `refusals`: right recipe, wrong place."""
    forced = facts.environment.get(FORCE, "")
    if forced and forced not in ENGINES:
        remarks.problems.append(Finding(FORCE, f"{FORCE}={forced} is no engine", f"one of {', '.join(ENGINES)}"))
    refusals += _refusals(facts, script=script)
    torch = of_workers(facts).torch_version
    supported = torch is None or supports(torch)
    known = f"torch {torch} in {of_workers(facts).python}: the agent knows {supported_torch('and')}"
    if forced == "agent" and not supported:
        refusals.append(Finding(FORCE, f"{FORCE}=agent, and {known}", f"unset {FORCE}: torchrun starts the workers"))
    if supported and forced != "torchrun":
        return Engine(name="agent")
    if supported:
        return Engine(name="torchrun", reason=f"{FORCE}=torchrun: the agent supervises torchrun, without fast restart")
    return Engine(name="torchrun", reason=f"{known}; it supervises torchrun instead, without fast restart")


def supports(torch: str) -> bool:
    """Whether the agent knows this version of torch."""
    return TORCH_FROM <= _release(torch) < TORCH_BELOW


def supported_torch(word: str) -> str:
    """`2.13 or 2.14`, with that word."""
    minors = range(TORCH_FROM[1], TORCH_BELOW[1])
    return f" {word} ".join(version_text((TORCH_FROM[0], minor)) for minor in minors)


def _refusals(facts: Facts, *, script: bool) -> list[Finding]:
    """Why these workers cannot start. Our own interpreter without torch only matters where a run is started."""
    own, here = facts.interpreter is None, of_workers(facts)
    torch = here.torch_version
    needs = f"workers need torch {version_text(OLDEST_TORCH)} or newer, {supported_torch('or')} for fast restarts"
    install = f"{here.python} -m pip install torch"
    if facts.interpreter is not None and facts.interpreter.fault:
        return [Finding("python", f"python: {here.python} cannot be run: {facts.interpreter.fault}")]
    found: list[Finding] = []
    if _release(here.python_version) < OLDEST_PYTHON:
        message = (
            f"python: {here.python} is Python {here.python_version}; {version_text(OLDEST_PYTHON)} or newer is needed"
        )
        found.append(Finding("python", message, "name an interpreter of a newer environment"))
    if torch is None and not own:
        message = f"python: {here.python} (Python {here.python_version}) has no torch; {needs}"
        found.append(Finding("python", message, install))
    if torch is not None and _release(torch) < OLDEST_TORCH:
        found.append(Finding("python", f"python: {here.python} has torch {torch}; {needs}", f"{install} --upgrade"))
    elif torch is not None and not script and not supports(torch):
        message = (
            f"python: {here.python} has torch {torch}; the built-in training program needs {supported_torch('or')}"
        )
        found.append(Finding("python", message, "pip install -c constraints.txt '.[train]'"))
    return found


def major_minor(version: str | None) -> Version | None:
    """`2.13.0+cpu` as (2, 13); None where it cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def version_text(version: Version) -> str:
    """`2.13`."""
    return f"{version[0]}.{version[1]}"


def _release(version: str) -> Version:
    """A version that cannot be read is older than all."""
    return major_minor(version) or (0, 0)
