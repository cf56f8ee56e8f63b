"""What the files of `docker/` promise that no build by one engine can show."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
STAGES = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("newer", [r"^#\s*syntax=", r"<<-?[\"']?\w+", r"--link\b", r"^ADD\b", r"--parents\b"])
def test_the_dockerfile_builds_with_docker_20_and_without_a_frontend_from_the_hub(newer: str) -> None:
    assert not re.search(newer, re.sub(r"^# .*$", "", DOCKERFILE, flags=re.MULTILINE), re.MULTILINE)
    assert not re.search(r"^#\s*syntax=", DOCKERFILE, re.MULTILINE)


def test_one_base_is_below_both_targets_and_the_one_for_cpus_is_what_no_target_makes() -> None:
    assert dict(map(reversed, STAGES)) == {
        "system": "${BASE}",
        "system-cpu": "system",
        "system-cuda": "system",
        "environment": "system",
        "packages-cuda": "environment",
        "packages-cpu": "environment",
        "code": "environment",
        "cuda": "system-cuda",
        "cpu": "system-cpu",
    }
    assert STAGES[-1][1] == "cpu"
    assert DOCKERFILE.count("USER 1000:0") == DOCKERFILE.count('ENTRYPOINT ["tini", "-s", "--"]') == 2
    assert len(re.findall(r"-c /project/constraints.txt", DOCKERFILE)) == 2


def test_all_that_an_image_is_made_of_is_let_into_the_context_and_nothing_is_by_default() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule[1:].partition("/")[0] for rule in rules if rule.startswith("!")}
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {word for line in lines for word in line.split()}
    bound = set(re.findall(r"source=([\w.]+)", DOCKERFILE)) - {"wheel"}
    assert copied | bound == let_in
    assert "**/.*" in rules


@pytest.mark.parametrize("build", ["", "cpu"])
def test_packages_of_an_image_are_those_of_pyproject_and_torch_for_cpus_is_asked_for_by_name(build: str) -> None:
    script = ROOT / "docker" / "steps" / "requirements.py"
    command = [sys.executable, script, ROOT / "pyproject.toml", ROOT / "constraints.txt", *filter(None, [build])]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pin] = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    asked = [f"{pin}+cpu"] if build else []
    assert said == [*project["dependencies"], *project["optional-dependencies"]["train"], *asked]


def test_the_compose_file_is_two_nodes_of_one_run() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    words = [services[name]["command"] for name in ("node-0", "node-1")]
    assert [[word for word in argv if "rank" in word] for argv in words] == [["--node-rank=0"], ["--node-rank=1"]]
    others = [[word for word in argv if "rank" not in word] for argv in words]
    assert others[0] == others[1]
    assert {"--nnodes=2", "--master-addr=node-0", "jobs.train"} <= set(others[0])
    assert [services[name]["hostname"] for name in ("node-0", "node-1")] == ["node-0", "node-1"]
