"""The engine of the tests is a real one, and takes the command lines of machines with GPUs and fast networks."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import engine as engine_module
import pytest
from engine import BASE, LIMIT_S, Engine, running_engine, site_packages

pytestmark = [pytest.mark.process, pytest.mark.needs("docker")]


def test_containers_of_a_bridge_know_each_other_and_torch_is_there(engine: Engine) -> None:
    engine.docker("network", "create", "bridge-of-test")
    engine.docker("run", "--detach", "--name", "one", "--network", "bridge-of-test", BASE, "sleep", "infinity")
    code = "import socket, torch; print(torch.__version__, socket.gethostbyname('one'))"
    said = engine.docker("run", "--rm", "--network", "bridge-of-test", *site_packages(), BASE, "python3", "-c", code)
    version, address = said.stdout.split()
    networks = engine.inspect("one")["NetworkSettings"]["Networks"]
    assert version.startswith("2.")
    assert address == networks["bridge-of-test"]["IPAddress"]
    assert "sleep" in Path(f"/proc/{engine.pid_of('one')}/cmdline").read_text()
    engine.docker("rm", "--force", "one")
    engine.docker("network", "rm", "bridge-of-test")


def test_the_command_line_of_a_gpu_machine_is_taken_where_there_is_the_runtime_and_refused_elsewhere(
    engine: Engine,
) -> None:
    flags = ("--rm", "--gpus", "all", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--ipc", "host", "--init")
    refused = engine.docker("run", *flags, BASE, "true", check=False)
    assert (refused.returncode, "could not select device driver" in refused.stderr) == (125, True)
    engine.stop_daemon()
    engine.start_daemon(gpus=True)
    try:
        said = engine.docker(
            "run", *flags, BASE, "python3", "-c", "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES'])"
        )
        assert said.stdout == "all\n"
    finally:
        engine.stop_daemon()
        engine.start_daemon()


def test_nothing_is_left_of_an_engine(engine: Engine) -> None:
    before = _links()
    with running_engine(base=False) as other:
        assert other.address != engine.address
        init, folder = other.init, other.folder
    assert not Path(f"/proc/{init}").exists()
    assert not folder.exists()
    assert _links() == before


def test_an_engine_ends_with_whoever_has_started_it_and_its_cgroups_with_the_next_one(
    engine: Engine,
) -> None:
    """Also when that is killed, and can remove nothing itself."""
    code = (
        "import engine, os, pathlib, sys\n"
        "with engine.running_engine(base=False) as one:\n"
        "    print(one.init, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    folder = Path(engine_module.__file__).parent
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    init = os.pidfd_open(int(started.stdout.readline()))
    started.kill()
    started.communicate()
    assert select.select([init], [], [], LIMIT_S)[0], "its process 1 lives on"
    os.close(init)
    groups = lambda: list(Path("/sys/fs/cgroup").glob(f"**/launch-test-{started.pid}-*"))  # noqa: E731
    with running_engine(base=False):
        assert groups() == []


def _links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}
