"""Containers on machines that are reached by ssh, each with an engine of its own, and no folder in common."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import criteria
import pytest
from docker_hosts import DockerBed
from launched import LAUNCH, Launch
from test_docker_runs import HOLD_AT, LIMIT_S, holds, recipe_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.needs("docker"),
    pytest.mark.needs("netns"),
    pytest.mark.timeout(400),
]


def test_containers_on_hosts_survive_a_kill_and_what_cannot_run_is_refused(
    docker_bed: DockerBed, launch: Launch, tmp_path: Path
) -> None:
    reference = criteria.undisturbed(tmp_path, recipe_of(), nodes=2)
    runs = tmp_path / "runs"
    docker_bed.own_disk(runs)
    path = tmp_path / "boxes.yaml"
    path.write_text(json.dumps(recipe_of(checkpoint={"every": "10 steps", "store": "replicate"})))
    arguments = ["--env", f"PYTHONPATH={tmp_path}:/site-packages", "--env", f"TEST_HOLD_AT={HOLD_AT}"]
    source = docker_bed.site_packages_mount()
    profile = docker_bed.docker_profile(args=arguments, mounts=[source, f"{tmp_path}/sitecustomize.py:ro"])

    run = launch(path, "--on", str(profile), prefix=docker_bed.calling(), cwd=tmp_path)
    planned = run.run.path / "plan.json"
    hosts = json.loads(planned.read_text())["hosts"]
    assert [node["machine"] for node in hosts["nodes"]] == ["h0", "h1"]
    assert (hosts["head_address"], hosts["shared"]) == (docker_bed.hosts[0].address, False)
    holds(run)  # by what has come home
    docker_bed.docker(docker_bed.hosts[1], "kill", f"{run.run_id}-node-1")
    run.wait_for_event("node_replaced", LIMIT_S, node=1)
    for host in docker_bed.hosts:
        docker_bed.on(host, "touch", str(run.run.path / "go-on"))
    assert run.wait(LIMIT_S) == 0, run.text
    criteria.assert_bit(run.run, reference)
    assert docker_bed.left() == []

    for override, sentence in (
        ("docker.network=mine", "docker.network: mine ends at its machine, and the nodes are on several"),
        ("docker.image=nobody:1", "the image nobody:1 on h0 is not there"),
        ("resources.nodes=3", "3 nodes, and docker.hosts has 2 hosts"),
    ):
        refused = subprocess.run(
            [*docker_bed.calling(), LAUNCH, str(path), "--on", str(profile), "docker.pull=never", override],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=LIMIT_S,
        )
        assert refused.returncode in (2, 3)
        assert re.search(re.escape(sentence), refused.stderr), refused.stderr
    assert docker_bed.left() == []
