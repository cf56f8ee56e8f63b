"""Docker: one container per node, started by the lines of the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from launcher.errors import Problem
from launcher.executors.docker_probe import ASK_S, engine_problem
from launcher.executors.docker_words import refusal
from launcher.executors.hosted import HostedExecutor
from launcher.executors.local_data import named_files
from launcher.executors.machines import ThisMachine, Unreachable
from launcher.planning.docker import SECRETS_FOLDER
from launcher.planning.plan import Plan


class DockerExecutor(HostedExecutor):
    """Runs each node of a plan in a container."""

    name: ClassVar[str] = "docker"

    def check(self, plan: Plan) -> Sequence[Problem]:
        """A daemon that is dead, an image, a GPU runtime or a folder that is not there."""
        assert plan.hosts is not None
        if plan.hosts.nodes[0].machine:
            return []  # the hosts were asked for the facts of the plan, and refused there (`docker_probe.py`)
        machine = ThisMachine()
        if (problem := engine_problem(machine)) is not None:
            return [problem]
        try:
            return [*_missing_image(plan, machine), *_missing_mounts(plan), *_data_outside(plan)]
        except Unreachable as error:
            return [Problem(where="docker", message=error.sentence, hint=error.hint)]


def _missing_image(plan: Plan, machine: ThisMachine) -> Iterator[Problem]:
    """One that nobody will fetch: our own is in no registry."""
    assert plan.hosts is not None
    image = plan.hosts.image
    if any(argv[:2] == ("docker", "pull") for argv in plan.hosts.before):
        return
    done = machine.run(["docker", "image", "inspect", "--format", "{{.Id}}", image], timeout_s=ASK_S)
    if done.code == 0:
        return
    if "no such image" not in done.words.lower():
        yield refusal(done.words, image=image, what="docker image inspect")
        return
    own = (plan.recipe.get("docker") or {}).get("image") is None
    if own:
        target = image.rpartition(":")[2]
        hint = f"make image TARGET={target}, from the sources of the launcher; or docker.image: one of yours with torch"
    else:
        hint = f"docker pull {image}, or docker.pull: missing"
    yield Problem(where="docker.image", message=f"there is no image {image} on this machine", hint=hint)


def _data_outside(plan: Plan) -> Iterator[Problem]:
    """Files of the data that a container would not see. Those that an image brings are its own matter."""
    assert plan.hosts is not None
    data = plan.recipe.get("data")
    if not data or plan.prepare or plan.setup or plan.recipe["docker"]["code"] == "image":
        return
    targets = [mount.target for node in plan.hosts.nodes[:1] for mount in node.mounts]
    for option, path in named_files(data.get("name"), data, Path(plan.worker.cwd)):
        if not any(path.is_relative_to(target) for target in targets):
            message = f"data.{option}: {path} is outside of what a container sees"
            hint = f"docker.mounts: [{path}:{path}:ro]" if path.exists() else "a mount of docker.mounts that has it"
            yield Problem(where=f"data.{option}", message=message, hint=hint)


def _missing_mounts(plan: Plan) -> Iterator[Problem]:
    """Docker has a sentence for one of them; here it is for all, and before anything exists."""
    assert plan.hosts is not None
    sources = {mount.source: mount for node in plan.hosts.nodes for mount in node.mounts}
    for source, mount in sources.items():
        made_by_us = source == plan.run_dir or mount.target == SECRETS_FOLDER
        if not made_by_us and not os.path.exists(Path(source)):  # noqa: PTH110 - a broken link is none
            message = f"there is no {source}, which a container is to see as {mount.target}"
            yield Problem(where="docker.mounts", message=message, hint="a path of this machine, relative to the recipe")
