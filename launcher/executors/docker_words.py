"""What Docker says when it refuses, in a sentence of ours with what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.errors import Problem

_KNOWN: Sequence[tuple[str, str, str]] = (
    (
        r"permission denied .*(docker\.sock|daemon socket)|dial unix .*permission denied",
        "you may not use the Docker daemon{where}",
        "sudo usermod -aG docker $USER, then log in again; or a rootless Docker",
    ),
    (
        r"Cannot connect to the Docker daemon|Is the docker daemon running|error during connect|connection refused"
        r"|failed to connect to the docker API",
        "the Docker daemon{where} does not answer",
        "sudo systemctl start docker; `docker info` says more; DOCKER_HOST names another daemon",
    ),
    (
        r"could not select device driver|unknown or invalid runtime name: nvidia|nvidia-container-cli",
        "Docker{where} cannot give GPUs to a container",
        "install NVIDIA's container toolkit there, then `nvidia-ctk runtime configure` and a restart of the daemon; "
        "resources.device: cpu goes without",
    ),
    (
        r"pull access denied|manifest unknown|manifest for .* not found|repository does not exist|not found: manifest"
        r"|No such image|Unable to find image|unauthorized",
        "the image {image} is not there{where}, and cannot be fetched",
        "docker.image: its exact name; `docker login` for a private registry; our own: `make image`",
    ),
    (
        r"no space left on device",
        "the disk of the Docker daemon{where} is full",
        "docker system df shows what takes it; docker system prune frees what nobody uses",
    ),
    (
        r"error setting rlimit",
        "the Docker daemon{where} may not raise the limits of a container (memlock, stack)",
        "LimitMEMLOCK=infinity in docker.service, and a restart of it",
    ),
    (
        r"docker-init.*(not found|no such file)",
        "Docker{where} has no docker-init, which is process 1 of each container",
        "install tini (Debian: the package tini), or dockerd --init-path",
    ),
    (
        r"available, non-overlapping|fully subnetted",
        "Docker{where} has no address range left for another network",
        "docker network prune removes those that nobody uses",
    ),
    (
        r"bind source path does not exist: (?P<path>[^\s;]+?)[.;\s]*($|\s)",
        "there is no {path}{where}, which a container is to see",
        "docker.mounts: folders that are there",
    ),
    (
        r"network (?P<path>\S+) not found",
        "there is no Docker network {path}{where}",
        "docker.network: auto makes one for the run",
    ),
)
"""What is recognized by, the sentence, and what helps."""


def refusal(said: str, *, machine: str = "", image: str = "", what: str = "docker") -> Problem:
    """Why a command was refused. One that nobody knows is shown in Docker's own words.

    what: the command, as far as it names what was to be done.
    """
    where = f" on {machine}" if machine else ""
    place = machine or "docker"
    for pattern, sentence, hint in _KNOWN:
        if found := re.search(pattern, said, re.IGNORECASE):
            path = found.groupdict().get("path") or ""
            text = sentence.format(where=where or " of this machine" * ("daemon" in sentence), image=image, path=path)
            return Problem(where=place, message=f"{text} ({_own_words(said)})", hint=hint)
    return Problem(where=place, message=f"{what}{where}: {_own_words(said) or 'it has failed without a word'}")


def _own_words(said: str) -> str:
    """The line of an error that counts, without the name of the program before it."""
    lines = [line.strip() for line in re.split(r"[\n;]", said) if line.strip()]
    lines = [line for line in lines if not line.startswith(("See 'docker", "Unable to find image", "Run 'docker"))]
    chosen = next((line for line in lines if re.search(r"error|denied|cannot|not|no ", line, re.IGNORECASE)), "")
    text = chosen or (lines[0] if lines else "")
    return re.sub(r"^(docker: )?(Error response from daemon: )?", "", text).rstrip(".")
