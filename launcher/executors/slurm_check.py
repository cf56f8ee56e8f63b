"""What can be seen before a job waits in the queue: partition and limits, interpreter, script, folders, space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.errors import Problem

if TYPE_CHECKING:
    from launcher.planning.plan import Plan


def preflight(plan: Plan) -> Sequence[Problem]:
    """Why this plan cannot run as a job of this cluster, all of it at once."""
    return []
