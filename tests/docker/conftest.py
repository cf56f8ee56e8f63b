"""The engine and the image: one for the session, made by the first test that asks for it."""

from __future__ import annotations

import pytest
from engine import Engine, engine, session_engine
from image import CPU, build_cpu
from launched import command, launch, recipe

__all__ = ["command", "engine", "launch", "recipe", "session_engine"]


@pytest.fixture(scope="session")
def cpu_image(session_engine: Engine) -> str:
    """The image of the target `cpu`, built from this tree."""
    build_cpu(session_engine)
    return CPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the image come last: the others do not wait for it."""
    items.sort(key=lambda item: "cpu_image" in getattr(item, "fixturenames", ()))
