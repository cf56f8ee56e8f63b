"""What is known of a host before a run goes there by ssh: one round trip, and the value that its answer is read into.

Pure: who has a machine runs `ask_argv` there (`executors/ssh_probe.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.planning.host_facts import HostFacts, host_facts, host_from_json
from launcher.planning.host_script import probe_argv

MODULES = {"job": ("torch", "numpy", "xxhash", "pydantic", "omegaconf", "yaml"), "script": ("torch",), "image": ()}
"""What the interpreter of a host has to have, by the kind of the workers; nothing where they run in an image. Our own
packages travel with the run."""

_ASK_PYTHON = """
import json, random, socket, sys
found = {"version": "%d.%d.%d" % tuple(sys.version_info[:3]), "torch": None, "missing": [], "port": None}
try:
    from importlib.metadata import version
    from importlib.util import find_spec
    found["missing"] = [name for name in sys.argv[1:] if find_spec(name) is None]
    if "torch" not in found["missing"]:
        found["torch"] = version("torch")
except ImportError:
    found["missing"] = sys.argv[1:]
with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
    low, high = map(int, file.read().split())
ports = [port for port in range(20000, 32000) if not low <= port <= high] or list(range(1025, low))
for port in random.sample(ports, 50):
    trial = socket.socket()
    try:
        trial.bind(("", port))
    except OSError:
        continue
    finally:
        trial.close()
    found["port"] = port
    break
print("launch-python " + json.dumps(found))
"""
"""Runs on any Python 3. The port is outside the range that the kernel gives to connections."""
_ASK = r"""
printf 'launch-ssh address %s\n' "$SSH_CONNECTION"
[ -e "$1" ] && echo 'launch-ssh shared'
[ -d "$5" ] && echo 'launch-ssh workdir'
if command -v "$2" >/dev/null 2>&1; then
    out=$(cd / && "$2" -c "$3" $4 2>&1 </dev/null); code=$?
    printf '%s\n' "$out"
    [ $code = 0 ] || printf 'launch-ssh python-fault %s: %s\n' "exit code $code" "$(printf '%s\n' "$out" | tail -n 1)"
else echo 'launch-ssh python-fault there is no such program'
fi
shift 5
exec "$@"
"""


@dataclass(frozen=True, kw_only=True)
class SshHost:
    """A plain value, so that tests write their own."""

    destination: str
    facts: HostFacts
    address: str = ""
    """Its own, by which the machine that launches has reached it."""
    python: str
    """The interpreter that was asked for."""
    python_version: str = ""
    torch_version: str | None = None
    missing: tuple[str, ...] = ()
    """Modules that the workers need, and that are not installed for it."""
    python_fault: str = ""
    """Why it could not be asked."""
    port: int | None = None
    """One that was free."""
    shared: bool = False
    """Whether it sees the folder of the runs as the machine that launches does: by a file that was written there."""
    sees_first: bool = True
    """Whether it sees that folder as the first host does."""
    has_workdir: bool = False
    """Whether there is a folder by the path of the workers' own."""
    clock_ahead_s: float | None = None
    """Of the clock of the machine that launches."""


def ask_argv(*, token: str, python: str, kind: str, workdir: str, folder: str) -> tuple[str, ...]:
    """The command whose output `ssh_host` reads.

    token: a file that was written beside the runs. folder: where run directories are made. workdir: of the workers.
    """
    modules = " ".join(MODULES[kind])
    return ("sh", "-c", _ASK, "launch-ask", token, python, _ASK_PYTHON, modules, workdir, *probe_argv((folder,)))


def ssh_host(destination: str, answer: str, *, python: str, asked_s: float, answered_s: float) -> SshHost:
    """Read what a host says. asked_s, answered_s: when, by the clock here. Raises ValueError."""
    facts = host_facts(answer)
    said, asked = _said(answer), _python(answer)
    connection = said.get("address", "").split()
    middle_s = (asked_s + answered_s) / 2
    return SshHost(
        destination=destination,
        facts=facts,
        address=connection[2] if len(connection) == 4 and connection[2] != "UNKNOWN" else "",
        python=python,
        python_version=asked.get("version", ""),
        torch_version=asked.get("torch"),
        missing=tuple(asked.get("missing", ())),
        python_fault="" if asked else said.get("python-fault", "it says nothing"),
        port=asked.get("port"),
        shared="shared" in said,
        has_workdir="workdir" in said,
        clock_ahead_s=None if facts.clock_s is None else round(facts.clock_s - middle_s, 3),
    )


def ssh_hosts_from_json(raw: Sequence[Mapping[str, Any]]) -> tuple[SshHost, ...]:
    """Read what `dataclasses.asdict` has made of the values. Raises TypeError for unknown names."""
    return tuple(
        SshHost(**{**each, "facts": host_from_json(each["facts"]), "missing": tuple(each.get("missing", ()))})
        for each in raw
    )


def _said(answer: str) -> dict[str, str]:
    lines = [line.removeprefix("launch-ssh ") for line in answer.splitlines() if line.startswith("launch-ssh ")]
    return {key: value for key, _, value in (line.partition(" ") for line in lines)}


def _python(answer: str) -> dict[str, Any]:
    line = next((line for line in answer.splitlines() if line.startswith("launch-python ")), None)
    return {} if line is None else dict(json.loads(line.removeprefix("launch-python ")))
