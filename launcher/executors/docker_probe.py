"""What the Docker engine of a machine has: asked before a run is planned. It leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, Refused
from launcher.executors.docker_words import refusal
from launcher.executors.machines import NOT_FOUND, Done, Machine, ThisMachine, Unreachable
from launcher.executors.ssh_machine import SshMachine
from launcher.planning.docker import HEAD_PORT, image_of, mount_text, read_mount
from launcher.planning.docker_facts import INFO, PROBE, DockerFacts, read_info, read_probe

if TYPE_CHECKING:
    from launcher.planning.ssh_facts import SshHost
    from launcher.recipe.schema import Recipe

ASK_S = 20.0
_PROBE_S = 120.0
"""An image that was never used is unpacked first."""
_MOST_AT_ONCE = 32
_DEVICES = ("/dev/infiniband",)
_REFUSED = 125
"""By the engine: nothing of the image has run."""
_NO_FOLDER = "bind source path does not exist"
_NO_IMAGE = "no such image"


def probe_docker(recipe: Recipe, *, gpus: bool, folder: str, machine: Machine | None = None) -> DockerFacts:
    """Ask the engine of a machine (this one), and the image of the recipe for its Python and packages.

    folder: where relative mounts begin.
    """
    there = ThisMachine() if machine is None else machine
    known: dict[str, Any] = {"image": image_of(recipe, gpus=gpus), "machine": there.name}
    try:
        known |= _whoever(there)
        known["devices"] = tuple(device for device in _DEVICES if _has(there, device))
        info = ask_engine(there)
        if isinstance(info, str):
            return DockerFacts(**known, fault=info)
        return DockerFacts(**known, **info, **_ask_image(there, recipe, known["image"], folder))
    except Unreachable as error:
        return DockerFacts(**known, fault=error.sentence)


def probe_docker_hosts(recipe: Recipe, hosts: Sequence[SshHost], *, folder: str) -> tuple[DockerFacts, ...]:
    """The engines of hosts, all at once. Raises Refused with every reason why one of them will not do."""
    machines = [SshMachine(host.destination, config=recipe.ssh.config) for host in hosts]
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(hosts)))) as pool:
        faults = [problem for problem in pool.map(engine_problem, machines) if problem is not None]
        if faults:
            raise Refused(faults)

        def ask(host: SshHost, machine: SshMachine) -> DockerFacts:
            found = probe_docker(recipe, gpus=bool(host.facts.gpus), folder=folder, machine=machine)
            return dataclasses.replace(found, free_port=host.port or HEAD_PORT)

        return tuple(pool.map(ask, hosts, machines))


def _whoever(machine: Machine) -> dict[str, int]:
    """Who runs commands there, and a port of this machine that is free now."""
    if not machine.name:
        return {"uid": os.getuid(), "gid": os.getgid(), "free_port": _free_port()}
    uid, gid = machine.run(["sh", "-c", "id -u; id -g"], timeout_s=ASK_S).text.split()
    return {"uid": int(uid), "gid": int(gid)}


def ask_engine(machine: Machine) -> dict[str, Any] | str:
    """What the engine says of itself, else the words with which it cannot be asked. Raises Unreachable."""
    done = machine.run(INFO, timeout_s=ASK_S)
    if done.code == NOT_FOUND:
        return no_docker(machine.name)
    try:
        return read_info(done.text)
    except ValueError as error:
        return str(error) or done.words


def no_docker(machine: str) -> str:
    """What is said where there is no `docker`."""
    return f"there is no docker on {machine or 'this machine'}"


def engine_problem(machine: Machine) -> Problem | None:
    """Why the engine of a machine cannot be used, as a sentence with what to do."""
    place = machine.name or "docker"
    try:
        said = ask_engine(machine)
    except Unreachable as error:
        return Problem(where=place, message=error.sentence, hint=error.hint)
    if not isinstance(said, str):
        return None
    if said == no_docker(machine.name):
        hint = "install Docker Engine; or --on local, which needs none"
        return Problem(where=place, message=said, hint=hint)
    return refusal(said, machine=machine.name)


def _ask_image(machine: Machine, recipe: Recipe, image: str, folder: str) -> dict[str, Any]:
    done = machine.run(
        ["docker", "image", "inspect", "--format", "{{json .Config.Entrypoint}}", image], timeout_s=ASK_S
    )
    if done.code:
        return {"has_image": False} if _NO_IMAGE in done.words.lower() else {"fault": done.words}
    found: dict[str, Any] = {"has_image": True, "entrypoint": tuple(json.loads(done.text) or ())}
    python = recipe.python or "python3"
    mounts = [mount for text in recipe.docker.mounts if (mount := read_mount(text, folder))]
    more = [*(word for mount in mounts for word in ("--mount", mount_text(mount))), *recipe.docker.args]
    answer = _run_probe(machine, image, python, more)
    read = read_probe(answer.text, python)
    if read is None and answer.code == _REFUSED:
        problem = refusal(answer.words, machine=machine.name, image=image, what="docker run")
        # All folders that are not there are told at once, by `DockerExecutor.check`.
        return {**found, "fault": "" if _NO_FOLDER in answer.words else problem.message}
    if read is None:
        return {**found, "fault": f"{python} in it: {answer.words or f'exit code {answer.code}'}"}
    interpreter, packages = read
    return {**found, "interpreter": interpreter, "packages": packages}


def _run_probe(machine: Machine, image: str, python: str, more: Sequence[str]) -> Done:
    """With the mounts and arguments of the recipe: they may bring packages along."""
    name = f"launch-probe-{os.getpid()}-{time.monotonic_ns()}"
    argv = ["docker", "run", "--rm", "--name", name, "--network", "none", "--pull", "never", "--entrypoint", python]
    try:
        return machine.run([*argv, *more, image, "-c", PROBE], timeout_s=_PROBE_S)
    except Unreachable:
        machine.run(["docker", "rm", "--force", name], timeout_s=ASK_S)
        raise


def _has(machine: Machine, path: str) -> bool:
    if not machine.name:
        return os.path.exists(path)  # noqa: PTH110 - a device
    return machine.run(["test", "-e", path], timeout_s=ASK_S).code == 0


def _free_port(among: Sequence[int] = range(20_000, 32_000)) -> int:
    """Below those that the kernel gives to connections; whether it is free is seen here, used by the head agent."""
    for port in random.sample(list(among), 50):
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
    return 0
