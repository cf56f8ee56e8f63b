"""SkyPilot's own loader and its own optimizer read what the plan makes. No cloud: prices are those of an invented list.

SkyPilot has an environment of its own, since it brings a hundred packages: `make sky-deps`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import LAUNCH
from rented import MAIN, plan_of
from sky_command import SKY

from launcher.errors import Problem
from launcher.executors import sky_client

pytestmark = [pytest.mark.process, pytest.mark.needs("sky"), pytest.mark.timeout(300)]

STORE = "checkpoint.store=s3://bucket/runs"
IMAGE = "sky.image=nvcr.io/nvidia/pytorch:25.01-py3"
GPUS = ("sky.accelerators=H100:8", "sky.infra=aws")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home for what SkyPilot writes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
    return tmp_path


@pytest.fixture
def server(home: Path) -> Iterator[None]:
    """SkyPilot starts it when it is asked for more than its loader; it is ended."""
    yield
    subprocess.run([str(SKY), "api", "stop"], capture_output=True, check=False)


def task_of(*overrides: str, nodes: int = 1) -> str:
    sky = plan_of(*overrides, nodes=nodes).sky
    assert sky is not None
    return sky.task


def loaded(*tasks: str) -> str:
    """What SkyPilot's loader says; empty: it takes them all."""
    said = sky_client.ask_helper(str(SKY), "load", "---\n".join(tasks), limit_s=120.0)
    return said if isinstance(said, str) else said.message


def test_tasks_for_one_and_four_nodes_spot_and_not_with_an_image_and_without_load(home: Path) -> None:
    choices = itertools.product((1, 4), ((), ("sky.spot=true", "sky.job_recovery=EAGER_NEXT_REGION")), ((), (IMAGE,)))
    rented = [task_of(*GPUS, STORE, "sky.max_hourly_cost=50", *spot, *image, nodes=n) for n, spot, image in choices]
    assert len(set(rented)) == 8
    cpus = task_of("sky.cpus=8+", "sky.memory=32", "sky.disk_size=200", "sky.resources.disk_tier=high")
    bucket = task_of("sky.file_mounts={/data: 's3://bucket/mnist'}")
    assert loaded(*rented, cpus, bucket) == ""


def test_a_misspelt_key_is_refused_in_its_words(home: Path) -> None:
    assert "did you mean 'disk_tier'" in loaded(task_of("sky.resources.disk_teir=high"))


def test_a_cloud_that_there_is_not_is_refused_before_anything_is_made(home: Path) -> None:
    done = launch(home, "sky.infra=nowhere", "--yes")
    assert done.returncode == 3, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (home / "runs").exists()


def launch(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [LAUNCH, str(MAIN), "--on", "sky", f"sky.command={SKY}", *words]
    env = {**os.environ, **more}
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, check=False, cwd=home
    )


def test_without_a_terminal_nothing_is_rented_unasked(home: Path) -> None:
    done = launch(home)
    assert done.returncode == 3
    assert "--yes" in done.stderr
    assert not (home / "runs").exists()


@pytest.mark.long
@pytest.mark.usefixtures("server")
def test_without_access_to_a_cloud_it_is_refused_in_one_sentence(home: Path) -> None:
    done = launch(home, "--yes")
    assert done.returncode == 3, done.stderr
    assert "Cloud access is not set up" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (home / "runs").exists()


CATALOG = {
    "lambda/vms.csv": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice\n"
    "gpu_8x_invented,H100,8,208,1800,24.00,us-west-1,,\n",
    "common/accelerators.csv": 'AcceleratorName,Clouds\nH100,"[Lambda]"\n',
}
ENABLE = (
    "from sky import global_user_state as g; from sky.clouds.cloud import CloudCapability as C; "
    "g.set_enabled_clouds(['lambda'], C.COMPUTE, 'default')"
)


@pytest.mark.long
@pytest.mark.usefixtures("server")
def test_prices_are_skypilots_and_what_it_cannot_rent_leaves_nothing(home: Path) -> None:
    for name, text in CATALOG.items():
        file = home / ".sky" / "catalogs" / "v8" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    python = str(SKY.with_name("python"))
    subprocess.run([python, "-c", ENABLE], check=True, capture_output=True)
    asked = ("sky.accelerators=H100:8", STORE, "--nodes", "2")
    price = sky_client.ask_helper(str(SKY), "price", task_of(*asked[:2], nodes=2), limit_s=180.0)
    assert isinstance(price, str)
    assert "gpu_8x_invented" in price
    assert "48.00" in price
    subprocess.run([python, "-c", ENABLE], check=True, capture_output=True)  # its server has looked for accounts
    done = launch(home, asked[0], f"checkpoint.store=file://{home}/bucket", *asked[2:], "--yes")
    assert done.returncode == 3, done.stderr
    assert "Credentials not found" in done.stderr
    assert not list((home / "runs").glob("*"))
    dear = sky_client.ask_helper(str(SKY), "price", task_of(*asked[:2], "sky.max_hourly_cost=1", nodes=2))
    assert isinstance(dear, Problem)


def test_the_command_is_found_or_named(tmp_path: Path) -> None:
    assert sky_client.find_command(str(SKY)) is None
    problem = sky_client.find_command(str(tmp_path / "sky"))
    assert problem is not None
    assert "there is no command" in problem.message
