"""The engine and the image: one for the session, made by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from docker_hosts import docker_bed
from engine import Engine, engine, session_engine
from image import CPU, build_cpu, torch_for_cpus
from launched import command, launch, recipe

__all__ = ["command", "docker_bed", "engine", "launch", "recipe", "session_engine"]


@pytest.fixture(scope="session")
def torch_place(session_engine: Engine) -> Iterator[list[str]]:
    """Where builds get torch from: one place for the session, since the cache of builds goes by it."""
    with torch_for_cpus(session_engine) as arguments:
        yield arguments


@pytest.fixture(scope="session")
def cpu_image(session_engine: Engine, torch_place: list[str]) -> str:
    """The image of the target `cpu`, built from this tree."""
    build_cpu(session_engine, torch_place)
    return CPU
