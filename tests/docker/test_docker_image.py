"""The image of `docker/Dockerfile`, built for real: what is in it, what is not, how it runs, stops and trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine import Engine
from image import ROOT, build_cpu, copy_of_the_tree
from launched import Launch

pytestmark = [pytest.mark.process, pytest.mark.needs("docker"), pytest.mark.timeout(900)]

LARGEST_BYTES = 1_300_000_000
LIMIT_S = 120.0
CANARY = "canary-5d0c3b77e1f9"
RECIPE = "recipes/mnist_ddp.yaml"
EVERY = ("train.eval_every=20 steps", "checkpoint.every=20 steps", "tracking.wandb.mode=disabled")
STEPS = ("train.until=40 steps", "resources.device=cpu", *EVERY)
JUNK = (
    *(".env", "token.txt", ".git/config", "launcher/.env", "jobs/.netrc", "slurm/key.pem", "recipes/key.txt"),
    *("runs/r-1/token", "docker/steps/.npmrc"),
)
CHANGED = "launch-test:changed"
VERSIONS = """
import importlib.metadata, json
print(json.dumps({each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}))
"""
LOOK = f"""
grep -rlI -e {CANARY} / --exclude-dir=proc --exclude-dir=sys 2>/dev/null
ls -A /root /run/secrets /mnt /srv 2>/dev/null
true
"""
COMPOSE = ROOT / "docker" / "compose.yaml"


def in_image(engine: Engine, image: str, *argv: str, flags: tuple[str, ...] = ()) -> str:
    return engine.docker("run", "--rm", *flags, image, *argv).stdout


def weights(text: str) -> set[str]:
    return set(re.findall(r"weights_sha256 ([0-9a-f]{64})", text))


def wait_until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return found


def test_the_image_is_small_runs_as_nobody_special_and_says_what_it_is(engine: Engine, cpu_image: str) -> None:
    seen = engine.inspect(cpu_image)
    config, labels = seen["Config"], seen["Config"]["Labels"]
    assert seen["Size"] <= LARGEST_BYTES
    assert config["User"] == "1000:0"
    assert (config["Entrypoint"], config["Cmd"]) == (["tini", "-s", "--"], ["launch", "--help"])
    wanted = {"title", "description", "licenses", "version", "revision", "created"}
    assert wanted == {name.removeprefix("org.opencontainers.image.") for name in labels}
    assert labels["org.opencontainers.image.licenses"] == _project()["license"]
    assert "Usage: launch" in in_image(engine, cpu_image)
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    installed = json.loads(in_image(engine, cpu_image, "python", "-c", VERSIONS))
    assert installed["torch"] == f"{pins['torch']}+cpu"
    others = {name: version for name, version in installed.items() if pins.get(name) != version}
    assert others.keys() <= {"launcher", "pip", "setuptools", "torch"}, others
    assert "pytest" not in installed


def test_whoever_the_container_runs_as_has_a_home_a_name_and_a_place_to_write(engine: Engine, cpu_image: str) -> None:
    code = (
        "import getpass, os, pathlib, tempfile, torch\n"
        "(pathlib.Path.home() / '.cache' / 'torch').mkdir(parents=True)\n"
        "pathlib.Path('runs').mkdir()\n"
        "print(os.getuid(), os.getgid(), getpass.getuser(), pathlib.Path.cwd())\n"
    )
    argv = ("python", "-c", code)
    assert in_image(engine, cpu_image, *argv) == "1000 0 launch /workspace\n"
    flags = ("--user", "12345:23456", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    assert in_image(engine, cpu_image, *argv, flags=flags) == "12345 23456 launch /workspace\n"


def test_a_stop_reaches_the_workers_which_save_before_they_leave(
    engine: Engine, cpu_image: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    flags = ("--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{runs}:/workspace/runs")
    argv = ("launch", RECIPE, "--nproc-per-node", "2", "train.until=20000 steps", *EVERY)
    engine.docker("run", "--detach", "--name", "stopped", *flags, cpu_image, *argv)
    try:
        metrics = lambda: [path for path in runs.glob("*/metrics.jsonl") if path.stat().st_size]  # noqa: E731
        [path] = wait_until(metrics)
        first = (Path("/proc") / str(engine.pid_of("stopped")) / "cmdline").read_bytes().split(b"\0")
        assert first[:3] == [b"tini", b"-s", b"--"]
        engine.docker("stop", "--time", "60", "stopped")
        assert engine.inspect("stopped")["State"]["ExitCode"] == 75, engine.docker("logs", "stopped").stdout
        result = json.loads((path.parent / "result.json").read_text())
        assert result["step"] > 0
        assert (path.parent / "checkpoints" / f"step-{result['step']}").is_dir()
    finally:
        engine.docker("rm", "--force", "stopped")


def test_two_containers_of_it_train_what_two_agents_of_this_machine_do(
    engine: Engine, cpu_image: str, launch: Launch
) -> None:
    arguments = (ROOT / RECIPE, *STEPS, "--nodes", "2")
    here = launch(*arguments, "--on", "local")
    assert here.wait(LIMIT_S) == 0, here.text
    there = launch(*arguments, "--on", "docker")
    assert there.wait(LIMIT_S) == 0, there.text
    assert cpu_image in there.run.plan.read_text()
    results = [json.loads(run.run.result.read_text()) for run in (here, there)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert {path.stat().st_uid for path in there.run.path.rglob("*")} == {os.getuid()}


def test_the_compose_file_trains_on_two_nodes(engine: Engine, cpu_image: str, tmp_path: Path) -> None:
    compose = _compose(engine)
    (tmp_path / "runs").mkdir()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((ROOT / RECIPE).read_text().replace("until: 8 epochs", "until: 40 steps"))
    env = {
        **{"IMAGE": cpu_image, "RUNS": str(tmp_path / "runs"), "RECIPE": "runs/recipe.yaml", "WANDB_MODE": "disabled"},
        **{"UID": str(os.getuid()), "GID": str(os.getgid()), "COMPOSE_PROJECT_NAME": "launch-test"},
    }
    shutil.copy(recipe, tmp_path / "runs" / "recipe.yaml")
    compose("config", "-q", env=env)
    try:
        said = compose("up", "--no-build", "--abort-on-container-exit", "--exit-code-from", "node-0", env=env)
        [sha] = weights(said)
        assert re.search(r"node-0.*starting: 40 of 40 steps, 2 ranks", said), said
        assert len(sha) == 64
    finally:
        compose("down", "--volumes", env=env)


def test_secrets_and_what_lies_about_in_the_folder_do_not_get_into_it_and_a_change_of_code_is_quick(
    engine: Engine, cpu_image: str, torch_place: list[str], tmp_path: Path
) -> None:
    context = copy_of_the_tree(tmp_path)
    for name in JUNK:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(CANARY)
    with (context / "launcher" / "errors.py").open("a") as code_of_ours:
        code_of_ours.write("\nIS_CHANGED = True\n")
    secret = tmp_path / "pip.conf"
    secret.write_text(f"[global]\nretries = 4\n# {CANARY}\n")
    try:
        options = ("--secret", f"id=pip,src={secret}", "--build-arg", "VERSION=1.2.3")
        said = build_cpu(engine, torch_place, *options, context=context, tag=CHANGED)
        steps = dict(re.findall(r"^#(\d+) \[([\w-]+ \d+/\d+)\]", said, re.MULTILINE))
        cached = {name for number, name in steps.items() if re.search(rf"^#{number} CACHED", said, re.MULTILINE)}
        assert {"packages-cpu 1/1", "environment 1/1"} <= cached, said
        code = "import launcher.errors; print(launcher.errors.IS_CHANGED)"
        assert in_image(engine, CHANGED, "python", "-c", code) == "True\n"
        found = in_image(engine, CHANGED, "sh", "-c", LOOK, flags=("--user", "0"))
        names = {line for line in found.splitlines() if line and not line.endswith(":")}
        assert names <= {".bashrc", ".profile"}, found
        history = engine.docker("history", "--no-trunc", CHANGED).stdout
        assert engine.proxy is not None
        assert [word for word in (CANARY, engine.proxy.url, engine.outside) if word in history] == []
        assert engine.inspect(CHANGED)["Config"]["Labels"]["org.opencontainers.image.version"] == "1.2.3"
        assert "PROXY" not in json.dumps(engine.inspect(CHANGED)["Config"]).upper()
    finally:
        engine.docker("image", "rm", "--force", CHANGED, check=False)


@pytest.mark.long
def test_with_a_compiler_torch_compile_works_and_without_one_it_is_not_there(
    engine: Engine, cpu_image: str, torch_place: list[str]
) -> None:
    code = (
        "import torch\n"
        "f = torch.compile(lambda x: torch.sin(x).relu() + 1)\n"
        "x = torch.linspace(0, 6, 1000)\n"
        "assert torch.allclose(f(x), torch.sin(x).relu() + 1)\n"
        "print('compiled')\n"
    )
    argv, flags = ("python", "-c", code), ("--user", "12345:23456")
    assert engine.docker("run", "--rm", cpu_image, "sh", "-c", "command -v g++", check=False).returncode
    try:
        build_cpu(engine, torch_place, "--build-arg", "WITH_COMPILER=1", tag="launch-test:compiler")
        assert in_image(engine, "launch-test:compiler", *argv, flags=flags) == "compiled\n"
    finally:
        engine.docker("image", "rm", "--force", "launch-test:compiler", check=False)


def _project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def _compose(engine: Engine) -> Callable[..., str]:
    """`docker compose`, or the older `docker-compose`."""
    if engine.docker("compose", "version", check=False).returncode == 0:
        return lambda *arguments, env: _said(engine.docker("compose", "--file", str(COMPOSE), *arguments, env=env))
    assert shutil.which("docker-compose"), "needs the compose plugin or docker-compose (as root: make test-deps)"
    return lambda *arguments, env: _said(engine.call("docker-compose", "--file", str(COMPOSE), *arguments, env=env))


def _said(done: Any) -> str:
    return str(done.stdout + done.stderr)
