"""ssh: one agent per host, over the system's OpenSSH, started by the lines of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from launcher.errors import Problem
from launcher.executors.hosted import HostedExecutor
from launcher.planning.plan import Plan


class SshExecutor(HostedExecutor):
    """Runs each node of a plan on a host that is reached by ssh."""

    name: ClassVar[str] = "ssh"

    def check(self, plan: Plan) -> Sequence[Problem]:
        """Nothing more: the hosts were asked for the facts of the plan, and refused there (`ssh_probe.py`)."""
        return []
