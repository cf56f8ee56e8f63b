"""What a Docker engine and an image of it say of themselves. The commands that ask, and the reading of their answers;
`executors/docker_probe.py` runs them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.planning.interpreters import Interpreter

INFO = ("docker", "info", "--format", "{{json .}}")
_OF_JOBS = ("torch", "numpy", "xxhash", "pydantic")
"""What the built-in training program imports."""
PROBE = f"""
import sys
print("launch-python %d.%d.%d" % tuple(sys.version_info[:3]))
try:
    from importlib.metadata import version
except ImportError:  # a Python that is too old
    version = None
for name in {_OF_JOBS!r} if version else ():
    try:
        print("launch-has " + name + " " + version(name))
    except ImportError:  # no such package
        pass
"""
"""Runs on any Python 3 of an image. What an entrypoint prints besides does not count."""
_INITS = ("tini", "dumb-init", "catatonit", "docker-init", "tini-static")


@dataclass(frozen=True, kw_only=True)
class DockerFacts:
    """The engine of one machine, and the image as it has it."""

    image: str
    """As it is asked for."""
    machine: str = ""
    """An ssh destination; empty: this machine."""
    fault: str = ""
    """Why the engine, or a container of the image, could not be asked."""
    version: str = ""
    rootless: bool = False
    """Whether root in a container is the user outside."""
    memory_bytes: int = 0
    """Of the machine."""
    has_image: bool | None = None
    """Whether the image is there. None: nobody could ask."""
    entrypoint: tuple[str, ...] = ()
    """Of the image."""
    interpreter: Interpreter | None = None
    """Of the image. None: it could not be asked."""
    packages: dict[str, str] | None = None
    """Those of the image that the training program imports, by their versions."""
    uid: int = 0
    """Of who launches."""
    gid: int = 0
    devices: tuple[str, ...] = ()
    """Those of /dev that a container is to have where they are: /dev/infiniband."""
    free_port: int = 0
    """One for the head agent, where it shares the network of its machine."""

    @property
    def has_init(self) -> bool:
        """Whether the image starts what it is told below a process 1 that only passes signals on."""
        return bool(self.entrypoint) and self.entrypoint[0].rpartition("/")[2] in _INITS

    def missing(self, *, script: bool) -> list[str]:
        """Packages that the workers import and the image has not: of a script torch alone is known."""
        wanted = ("torch",) if script else _OF_JOBS
        return [name for name in wanted if self.packages is not None and name not in self.packages]


def docker_from_json(raw: Sequence[dict[str, Any]]) -> tuple[DockerFacts, ...]:
    """Read facts that were written down."""
    return tuple(
        DockerFacts(
            **{
                **each,
                "entrypoint": tuple(each.get("entrypoint", ())),
                "devices": tuple(each.get("devices", ())),
                "interpreter": Interpreter(**each["interpreter"]) if each.get("interpreter") else None,
            }
        )
        for each in raw
    )


def read_info(text: str) -> dict[str, Any]:
    """What of `docker info` counts, as fields of DockerFacts. Raises ValueError with the engine's own sentence."""
    try:
        said = json.loads(text)
    except ValueError:
        raise ValueError("") from None
    if errors := said.get("ServerErrors"):
        raise ValueError("; ".join(map(str, errors)))
    options = [str(option) for option in said.get("SecurityOptions") or ()]
    return {
        "version": str(said.get("ServerVersion", "")),
        "rootless": any("name=rootless" in option for option in options),
        "memory_bytes": int(said.get("MemTotal") or 0),
    }


def read_probe(text: str, python: str) -> tuple[Interpreter, dict[str, str]] | None:
    """The interpreter of an image and its packages, by what PROBE printed; None where it printed nothing."""
    words = [line.split() for line in text.splitlines() if line.startswith("launch-")]
    version = next((each[1] for each in words if each[0] == "launch-python" and len(each) == 2), None)
    if version is None:
        return None
    packages = {each[1]: each[2] for each in words if each[0] == "launch-has" and len(each) == 3}
    return Interpreter(path=python, version=version, torch_version=packages.get("torch")), packages
