"""Networks of containers: what a preset mounts is seen inside, the preflight between them, and what the doctor says."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BASE, Engine, site_packages
from launched import Launch
from tiny import tiny

from launcher.planning.host_facts import HostFacts, host_facts
from launcher.planning.host_script import probe_argv
from launcher.planning.presets import container_needs

pytestmark = [pytest.mark.process, pytest.mark.needs("docker"), pytest.mark.timeout(300)]

Command = Callable[..., subprocess.CompletedProcess[str]]
CONF = "NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml"


def profile_of(folder: Path) -> Path:
    path = folder / "boxes.yaml"
    _, volume, *_ = site_packages()
    source = volume.split(":")[0]
    args = ["--env", f"PYTHONPATH={Path(__file__).parents[2]}:/site-packages"]
    section = {"image": BASE, "mounts": [f"{source}:/site-packages:ro"], "args": args}
    path.write_text(json.dumps({"executor": "docker", "docker": section}))
    return path


@pytest.fixture
def azure(engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """The engine's machine brings what Azure's images do, for as long as the test: on top of its own folders."""
    for folder in ("etc", "opt"):
        (tmp_path / folder).mkdir()
        (tmp_path / f"{folder}-work").mkdir()
        options = f"lowerdir=/{folder},upperdir={tmp_path / folder},workdir={tmp_path / folder}-work"
        run(engine, "mount", "-t", "overlay", "-o", options, "overlay", f"/{folder}")
    run(engine, "sh", "-ec", f"echo {CONF} > /etc/nccl.conf; mkdir -p /opt/microsoft/ndv5; echo topo > "
        "/opt/microsoft/ndv5/topo.xml")  # fmt: skip
    yield engine
    for folder in ("etc", "opt"):
        run(engine, "umount", f"/{folder}")


def run(engine: Engine, *argv: str) -> str:
    """Where the engine is."""
    done = subprocess.run(engine.inside(*argv), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(engine: Engine) -> HostFacts:
    return host_facts(run(engine, *probe_argv()))


def test_a_container_sees_what_the_preset_mounts(azure: Engine) -> None:
    host = found(azure)
    assert (host.nccl_conf, set(host.paths)) == ((CONF,), {"/etc/nccl.conf", "/opt/microsoft"})
    needs = container_needs("azure-nd", host)
    volumes = [word for mount in needs.mounts for word in ("--volume", mount)]
    look = "cat /etc/nccl.conf /opt/microsoft/ndv5/topo.xml; echo x > /etc/nccl.conf"
    done = azure.docker("run", "--rm", *volumes, BASE, "sh", "-c", look, check=False)
    assert done.stdout == f"{CONF}\ntopo\n"
    assert "Read-only file system" in done.stderr
    bare = azure.docker("run", "--rm", BASE, "sh", "-c", look, check=False)
    assert CONF not in bare.stdout, "without the mounts it is not there"


def test_the_preflight_of_two_containers(engine: Engine, launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "preflight.yaml"
    sections: dict[str, Any] = {
        "name": "preflight",
        "train": {"until": "3 steps"},
        "resources": {"nodes": 2, "threads": 1},
        "faults": {"preflight": True},
    }
    path.write_text(json.dumps(tiny(**sections)))
    done = launch(path, "--on", str(profile_of(tmp_path)), cwd=tmp_path)
    assert done.wait(120.0) == 0, done.text
    (measured,) = [event for event in done.events if event["event"] == "preflight"]
    assert measured["faults"] == []
    assert measured["took_s"] < 3.0
    assert {node["interface"] for node in measured["nodes"].values()} == {"eth0"}


def test_the_doctor_looks_inside(engine: Engine, command: Command, tmp_path: Path) -> None:
    profile = profile_of(tmp_path)
    done = command("doctor", "--on", str(profile), "--all-reduce", "--json")
    said = json.loads(done.stdout)["findings"]
    (torch,) = [each for each in said if each["what"] == "torch"]
    assert (torch["level"], torch["where"]) == ("ok", f"a container of {BASE}")
    (shm,) = [each for each in said if each["what"] == "/dev/shm"]
    assert shm["level"] == "PROBLEM", "64 MiB"
    (summed,) = [each for each in said if each["what"] == "all-reduce"]
    assert summed["message"].startswith("1 host, 2 processes over gloo: 64 MiB in ")
    assert done.returncode == 1
    assert engine.left() == []


def test_the_doctor_says_what_image_is_not_there_and_fetches_none(
    engine: Engine, command: Command, tmp_path: Path
) -> None:
    profile = tmp_path / "none.yaml"
    profile.write_text(json.dumps({"executor": "docker", "docker": {"image": "no-such-image:1"}}))
    done = command("doctor", "--on", str(profile), "--json")
    (found,) = json.loads(done.stdout)["findings"]
    assert (done.returncode, found["level"], found["what"]) == (1, "PROBLEM", "host")
    assert found["message"].startswith("the image no-such-image:1 is not there, and cannot be fetched")
    assert found["fix"]
    assert done.stderr == ""
