"""Nodes that are reached by ssh: the line that is run for each, and who they are. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def ssh_argv(
    destination: str, command: Sequence[str], *, config: str | None = None, options: Sequence[str] = ()
) -> list[str]:
    """The ssh that runs a command there; without one, the one that logs in.

    The login shell of the other side gets one text, so the words are quoted for it.
    """
    file = [] if config is None else ["-F", config]
    given = [word for option in options for word in ("-o", option)]
    return ["ssh", *file, *given, destination, *([shlex.join(command)] if command else [])]
