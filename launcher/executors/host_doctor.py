"""`launch doctor --on`: the hosts of a profile, each alone and all together. Machines are asked at the same time."""

from __future__ import annotations

import json
import random
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import launcher
from launcher.executors.host_probe import ask_host
from launcher.executors.machines import Done, Machine, ThisMachine, Unreachable
from launcher.planning.all_reduce import Tried
from launcher.planning.doctor import Diagnosis, Level
from launcher.planning.doctor_hosts import Asked, diagnose_host, diagnose_together
from launcher.planning.doctor_links import judge_between
from launcher.planning.host_facts import HostFacts
from launcher.planning.probes import ASK_TORCH, Torch, torch_of

if TYPE_CHECKING:
    from launcher.planning.facts import Facts

_T = TypeVar("_T")
_MOST_AT_ONCE = 32
_START_S = 60.0
"""For the import of torch, on a host that has to read it from a file system that is far."""
_QUICK_S = 10.0
_LIMIT_S = 30.0
"""For ranks on several hosts to meet, and to be through."""
_PORTS = range(20_000, 32_000)
_CONTAINERS = ("docker", "br-", "virbr", "cni", "flannel", "cali", "veth")
_TEST = Path(launcher.__file__).parent.with_name("jobs") / "all_reduce.py"
_AT_ROOT = ("sh", "-c", 'cd / && exec "$@"', "launch")
"""Where no folder of the user's is taken for a package."""


def examine(
    machines: Sequence[Machine], *, python: str, runs_root: str, all_reduce: bool | None, environment: Mapping[str, str]
) -> Iterator[Diagnosis]:
    """Each machine, then all beside each other, then what they do together. python: their interpreter with torch.

    all_reduce: None: where there are several machines. environment: of the test, on each.
    """
    answers = _at_once(machines, lambda machine: _ask_both(machine, runs_root, python))
    found, torch = [asked for asked, _ in answers], [has for _, has in answers]
    hosts: list[tuple[Machine, Asked]] = []
    for machine, asked, has in zip(machines, found, torch, strict=True):
        if isinstance(asked, Unreachable):
            fix = asked.hint or "see the message of ssh"
            yield Diagnosis(level=Level.PROBLEM, what="host", message=asked.sentence, fix=fix, where=machine.name)
            continue
        yield from diagnose_host(asked.facts, where=_name(machine))
        yield from _judge_torch(machine, python, has, asked.facts)
        version = has.version if isinstance(has, Torch) else None
        hosts.append((machine, _with_torch(asked, version)))
    if len(hosts) > 1:
        yield from diagnose_together([asked for _, asked in hosts])
        yield from _shared(hosts, runs_root)
    usable = [each for each in torch if isinstance(each, Torch) and each.version and each.distributed]
    several = len(hosts) > 1 or any(each.devices > 1 for each in usable)
    if all_reduce is False or len(usable) < len(machines) or (all_reduce is None and not several):
        return
    yield from _together(hosts, python, usable, environment)


def _at_once(machines: Sequence[Machine], what: Callable[[Machine], _T]) -> list[_T]:
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(machines)))) as pool:
        return list(pool.map(what, machines))


def _name(machine: Machine) -> str:
    return machine.name or "this machine"


def _ask_both(machine: Machine, runs_root: str, python: str) -> tuple[Asked | Unreachable, Torch | Unreachable]:
    """One that does not answer is not asked twice."""
    asked = _ask(machine, runs_root)
    return asked, asked if isinstance(asked, Unreachable) else _ask_torch(machine, python)


def _ask(machine: Machine, runs_root: str) -> Asked | Unreachable:
    begin_s = time.time()
    try:
        facts = ask_host(machine, (runs_root,))
    except Unreachable as error:
        return error
    took_s = time.time() - begin_s
    ahead_s = None if facts.clock_s is None else facts.clock_s - (begin_s + took_s / 2)
    return Asked(name=_name(machine), facts=facts, ahead_s=ahead_s, unsure_s=took_s / 2)


def _with_torch(asked: Asked, version: str | None) -> Asked:
    return Asked(
        name=asked.name, facts=asked.facts, ahead_s=asked.ahead_s, unsure_s=asked.unsure_s, torch=version or None
    )


def _ask_torch(machine: Machine, python: str) -> Torch | Unreachable:
    try:
        done = machine.run((*_AT_ROOT, python, "-c", ASK_TORCH), timeout_s=_START_S)
    except Unreachable as error:
        return error
    return torch_of(done.text, done.err.decode(errors="replace"), done.code)


def _judge_torch(machine: Machine, python: str, torch: Torch | Unreachable, host: HostFacts) -> Iterator[Diagnosis]:
    where, fix = (
        _name(machine),
        "`ssh.python` (or `python`) names an interpreter with torch, the same path on each host",
    )
    if isinstance(torch, Unreachable):
        yield Diagnosis(level=Level.PROBLEM, what="torch", message=torch.sentence, fix=torch.hint or fix, where=where)
    elif not torch.version:
        message = f"{python} cannot import it: {torch.fault}"
        yield Diagnosis(level=Level.PROBLEM, what="torch", message=message, fix=fix, where=where)
    elif host.gpus and torch.devices < len(host.gpus):
        message = f"torch {torch.text} sees {torch.devices} of {len(host.gpus)} GPUs" + (
            f": {torch.fault}" if torch.fault else ""
        )
        fix = f"driver {host.gpus[0].driver} runs up to CUDA {host.cuda or '?'}; CUDA_VISIBLE_DEVICES on the host"
        yield Diagnosis(level=Level.PROBLEM, what="torch", message=message, fix=fix, where=where)
    else:
        yield Diagnosis(level=Level.OK, what="torch", message=f"{torch.text} for {python}", where=where)


def _shared(hosts: Sequence[tuple[Machine, Asked]], runs_root: str) -> Iterator[Diagnosis]:
    """Whether a file that the first host writes is there for the others."""
    folder = shlex.quote(runs_root)
    token = f"{runs_root}/.launch-doctor-{secrets.token_hex(8)}"
    path = shlex.quote(token)
    # A folder of runs that is made for this is taken away again.
    make = f"[ -d {folder} ] || {{ mkdir -p {folder} && touch {path}.made; }}; umask 077; : > {path}"
    drop = f"rm -f {path}; [ -e {path}.made ] && {{ rm -f {path}.made; rmdir {folder}; }}; true"
    first, others = hosts[0], hosts[1:]
    if _run(first[0], "sh", "-c", make).code != 0:
        return  # that it cannot be written is said already
    try:
        seen = _at_once([machine for machine, _ in others], lambda machine: _run(machine, "sh", "-c", f"[ -e {path} ]"))
    finally:
        _run(first[0], "sh", "-c", drop)
    without = [asked.name for (_, asked), done in zip(others, seen, strict=True) if done.code != 0]
    if without:
        message = f"{runs_root}: what {first[1].name} writes is not seen by {', '.join(without)}"
        fix = "a folder that all hosts share (--runs-dir); without one checkpoint.store: replicate, or a URL"
        yield Diagnosis(level=Level.NOTE, what="shared folder", message=message, fix=fix)
    else:
        message = f"{runs_root} is one folder on all {len(hosts)} hosts"
        yield Diagnosis(level=Level.OK, what="shared folder", message=message)


def _run(machine: Machine, *argv: str) -> Done:
    try:
        return machine.run(argv, timeout_s=_QUICK_S)
    except Unreachable as error:
        return Done(255, b"", error.sentence.encode())


def _together(
    hosts: Sequence[tuple[Machine, Asked]], python: str, torch: Sequence[Torch], environment: Mapping[str, str]
) -> Iterator[Diagnosis]:
    """Start the ranks on all hosts at once."""
    gpus = min(each.devices for each in torch)
    on_gpus = gpus > 0
    ranks = gpus if on_gpus else 1 if len(hosts) > 1 else 2
    addresses = [_address(asked.facts) for _, asked in hosts]
    if len(hosts) > 1 and not addresses[0]:
        message = f"cannot be tried: no address of {hosts[0][1].name} is known that others reach"
        fix = "`ip` (iproute2) on that host shows them to the launcher"
        yield Diagnosis(level=Level.NOTE, what="all-reduce", message=message, fix=fix)
        return
    order = {
        "device": "cuda" if on_gpus else "cpu",
        "ranks": ranks,
        "limit_s": _LIMIT_S,
        "nodes": len(hosts),
        "head": addresses[0],
        "port": random.choice(_PORTS),
    }
    source = _TEST.read_text(encoding="utf-8")
    variables = [f"{name}={value}" for name, value in environment.items()]

    def start(numbered: tuple[int, Machine]) -> Tried:
        node, machine = numbered
        argv = (*_AT_ROOT, "env", *variables, python, "-c", source)
        told = json.dumps({**order, "node": node}).encode()
        try:
            done = machine.run(argv, input=told, timeout_s=_LIMIT_S + _START_S)
        except Unreachable as error:
            return Tried(ok=False, said=error.sentence)
        lines = [line for line in done.text.splitlines() if line.startswith("{")]
        if done.code or not lines:
            return Tried(ok=False, said=done.words.rpartition("; ")[2] or f"it ended with exit code {done.code}")
        return Tried(**json.loads(lines[-1]))

    with ThreadPoolExecutor(len(hosts)) as pool:
        said = list(pool.map(start, enumerate(machine for machine, _ in hosts)))
    tried = {asked.name: each for (_, asked), each in zip(hosts, said, strict=True)}
    facts = {asked.name: asked.facts for _, asked in hosts}
    yield from judge_between(tried, facts, addresses, ranks=ranks, on_gpus=on_gpus)


def _address(host: HostFacts) -> str:
    """By which the others reach it: as ssh has, else that of its first cable."""
    found = [
        address
        for each in host.interfaces
        for address in each.addresses
        if not each.name.startswith(("lo", *_CONTAINERS)) and not address.startswith(("127.", "::1", "fe80"))
    ]
    if host.reached_at and not host.reached_at.startswith("127."):
        return host.reached_at
    return next((address for address in found if "." in address), next(iter(found), ""))


def examine_here(
    facts: Facts, runs_root: Path, *, all_reduce: bool | None, environment: Mapping[str, str]
) -> Iterator[Diagnosis]:
    """This machine."""
    from launcher.agent.stacks import find_pyspy
    from launcher.planning.all_reduce import all_reduce_here
    from launcher.planning.doctor import diagnose
    from launcher.planning.doctor_speed import peak_between_gpus
    from launcher.planning.facts import package_version
    from launcher.planning.machine import probe_machine
    from launcher.runs.find import state_root

    wandb = package_version("wandb", sys.path)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(_ask, ThisMachine(), str(runs_root.absolute()))
        machine = probe_machine(facts, runs_root, state_root(), pyspy=find_pyspy(), wandb_version=wandb)
        asked = asking.result()
    yield from diagnose(machine)
    peak = None
    if isinstance(asked, Asked):
        yield from diagnose_host(asked.facts)
        peak = peak_between_gpus(asked.facts)
    else:
        fix = "a POSIX shell, `sh`, has to be on PATH"
        yield Diagnosis(level=Level.NOTE, what="probe", message=asked.sentence, fix=fix)
    yield from all_reduce_here(machine, asked=all_reduce, environment=environment, peak=peak)
