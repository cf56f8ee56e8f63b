"""Runs that start together never meet, and a port that is taken is said before anything is made."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import Launch, Recipe

pytestmark = pytest.mark.process

MEETS = "import toy\ntoy.join().destroy_process_group()\n"


def test_ten_launches_at_once_all_finish(launch: Launch, recipe: Recipe) -> None:
    """F002"""
    path = recipe(MEETS)
    runs = [launch(path) for _ in range(10)]
    assert [run.wait() for run in runs] == [0] * 10, "\n".join(run.text for run in runs)
    assert all(run.result["attempts"] == 1 for run in runs)


@pytest.mark.parametrize("time_", range(2))
def test_two_launches_at_the_same_moment_finish(launch: Launch, recipe: Recipe, time_: int) -> None:
    """F002"""
    path = recipe(MEETS, nodes=2, nproc=1)
    runs = [launch(path) for _ in range(2)]
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.text for run in runs)
    ports = {event["master_port"] for run in runs for event in run.happened("attempt_started")}
    assert len(ports) == 2


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def test_a_fixed_port_that_is_taken_is_refused_in_one_line(
    launch: Launch, recipe: Recipe, taken_port: int, tmp_path: Path
) -> None:
    """F002"""
    run = launch(recipe(MEETS), f"network.master_port={taken_port}")
    assert run.wait() == 3, run.text
    assert time.monotonic() - run.started_s < 5.0
    first, *rest = run.text.splitlines()
    assert f"port {taken_port} is in use" in first
    assert f"pid {os.getpid()}" in first
    assert len(rest) == 1
    assert "hint" in rest[0]
    assert not (tmp_path / "runs").exists()


def test_a_fixed_port_is_used_by_every_attempt(launch: Launch, recipe: Recipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    source = "import toy\ndist = toy.join()\nif toy.ATTEMPT < 3: raise SystemExit(7)\ndist.destroy_process_group()\n"
    run = launch(recipe(source, resume="self", network={"master_port": port}))
    assert run.wait() == 0, run.text
    assert [event["master_port"] for event in run.happened("attempt_started")] == [port] * 3


@pytest.fixture
def ipv6_only() -> Iterator[tuple[str, ...]]:
    """A network namespace whose loopback has no IPv4 address; the words that run a command in it."""
    name = f"launch-test-{os.getpid()}"
    inside = ("ip", "netns", "exec", name)
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        subprocess.run([*inside, "ip", "address", "del", "127.0.0.1/8", "dev", "lo"], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.needs("netns")
def test_a_machine_with_ipv6_alone(launch: Launch, recipe: Recipe, ipv6_only: tuple[str, ...]) -> None:
    """F096: the agents, the workers' store and gloo all speak over ::1."""
    run = launch(recipe(MEETS, nodes=2, nproc=1), prefix=ipv6_only)
    assert run.wait() == 0, run.text
    assert {event["master_addr"] for event in run.happened("attempt_started")} == {"::1"}
    assert run.run.agents_log.read_text() == ""
