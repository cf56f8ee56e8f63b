"""Asks a machine what it has: one round trip of the probe of `planning/host_script.py`."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.executors.machines import Machine, ThisMachine, Unreachable
from launcher.planning.host_facts import HostFacts, host_facts
from launcher.planning.host_script import PROBE_LIMIT_S, probe_argv


def ask_host(machine: Machine | None = None, folders: Sequence[str] = ()) -> HostFacts:
    """What a machine (this one) has; folders: where space is looked up. Raises Unreachable."""
    there = ThisMachine() if machine is None else machine
    done = there.run(probe_argv(folders), timeout_s=PROBE_LIMIT_S)
    try:
        return host_facts(done.out.decode(errors="replace"))
    except ValueError as error:
        said = f": {done.words}" if done.err.strip() else ""
        name = there.name or "this machine"
        raise Unreachable(f"{name}: {error}{said}", "a host needs a POSIX shell, and Linux") from None
