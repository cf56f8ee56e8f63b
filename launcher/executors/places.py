"""The nodes of one run where they are: started, looked at, signalled and removed one by one.

Docker and ssh have one each (`docker_places.py`, `ssh_places.py`). Whoever uses it, the command that launches or the
watcher, may be another process each time: all that it knows is in the plan and in the run directory.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

_PLACES = {
    "docker": "launcher.executors.docker_places:DockerPlaces",
    "ssh": "launcher.executors.ssh_places:SshPlaces",
}
"""Name of an executor -> where its class is, imported on use; its constructor takes a plan and a run directory."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What is known of the agent of a node now."""

    alive: bool | None
    """None: its machine does not answer, so nobody knows."""
    exit_code: int | None = None
    """Of one that has ended, where its place knows it."""
    detail: str = ""
    """A sentence for people, where there is something to say: out of memory, why the machine does not answer."""
    there: bool = True
    """Whether something of it is left there (a container, files) for `remove`."""
    killed: bool = False
    """Of one that has ended: whether something from outside did it, so that another one in its place may go on."""


class Places(Protocol):
    """Where the nodes of a run are."""

    def prepare(self) -> None:
        """What has to be there before the first node starts: a network, copies of files. Raises Refused.

        Where it raises, nothing of the run is left behind.
        """

    def start(self, node: int) -> None:
        """Start the agent of a node, detached, in place of one that has ended. Raises Refused."""

    def states(self, nodes: Sequence[int]) -> dict[int, NodeState]:
        """Of these nodes. Never raises for a machine that does not answer."""

    def signal(self, node: int, signum: int) -> bool:
        """Send a signal to the agent of a node (see `agent/task.py`). False: it was not there, or not reached."""

    def words(self, node: int) -> str:
        """The last lines that the agent of a node has printed, where they are not in the run directory already."""

    def remove(self, node: int) -> bool:
        """End what is left of a node, at once, and remove it. False: its machine does not answer."""

    def clear(self) -> bool:
        """Remove what `prepare` has made, when all nodes are removed. False: something is left."""

    def bring_home(self) -> bool:
        """Copy what is new in the nodes' run directories into this one, where they do not share it.

        False: a machine did not answer.
        """


def places_of(plan: Plan, run: RunDir) -> Places:
    """Where the nodes of a plan with `hosts` are."""
    module, _, attribute = _PLACES[plan.executor].partition(":")
    places: Places = getattr(importlib.import_module(module), attribute)(plan, run)
    return places
