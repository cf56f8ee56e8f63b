"""What the head decides: orders to agents, events to write down, words for people, the end of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.runs.states import Cause, RunState


@dataclass(frozen=True)
class Send:
    """An order to every agent (node None) or to one."""

    message: dict[str, Any]
    node: int | None = None


@dataclass(frozen=True)
class Record:
    """An event to write down."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Say:
    """A line for the person who watches."""

    text: str


@dataclass(frozen=True)
class Finish:
    """The run is over."""

    state: RunState
    cause: Cause
    exit_code: int
    reason: str
    policy: str = ""
    """Why it was not restarted, where a restart was weighed."""


@dataclass(frozen=True)
class Leave:
    """The allocation is over for the agents; whether the run is, the batch side decides."""

    cause: Cause
    exit_code: int
    reason: str
    saved: bool
    node: int | None = None
    host: str = ""


Effect = Send | Record | Say | Finish | Leave
