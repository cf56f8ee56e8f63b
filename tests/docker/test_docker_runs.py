"""Runs in containers of a real engine: the main road, and what happens to containers in the middle of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import criteria
import pytest
from criteria import Reference
from engine import BASE, Engine, site_packages
from launched import LAUNCH, Launch, Launched
from tiny import tiny

from launcher.executors.docker_words import refusal
from launcher.executors.watch_lock import watcher_of
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.needs("docker"), pytest.mark.timeout(300)]

STEPS, HOLD_AT = 60, 35
LIMIT_S = 120.0
CANARY = "canary-3b1f7a90c4e2"

Boxes = Callable[..., Launched]
Command = Callable[..., subprocess.CompletedProcess[str]]


def recipe_of(**sections: Any) -> dict[str, Any]:
    return tiny(
        **{
            "name": "boxes",
            "train": {"until": f"{STEPS} steps", "eval_every": "20 steps"},
            "checkpoint": {"every": "10 steps"},
            "resources": {"nodes": 2, "threads": 1},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same on two nodes of this machine, without containers."""
    return criteria.undisturbed(tmp_path_factory.mktemp("reference"), recipe_of(), nodes=2)


def profile_of(folder: Path, hold_at: int, **docker: Any) -> Path:
    """A profile whose image has the packages of these tests, and imports the `sitecustomize` of `criteria`."""
    source = site_packages()[1].split(":")[0]
    criteria.install(folder)
    section = {
        "image": BASE,
        "mounts": [f"{source}:/site-packages:ro"],
        "args": ["--env", f"PYTHONPATH={folder}:/site-packages", "--env", f"TEST_HOLD_AT={hold_at}"],
        **docker,
    }
    path = folder / "boxes.profile.yaml"
    path.write_text(json.dumps({"executor": "docker", "docker": section}))
    return path


@pytest.fixture
def boxes(engine: Engine, launch: Launch, tmp_path: Path) -> Iterator[Boxes]:
    """Launch the recipe on two containers. hold_at: a step that waits for `go-on`. What a test that fails leaves is
    removed, for the next one."""
    started: list[Launched] = []

    def start(*arguments: str, hold_at: int = 0, docker: dict[str, Any] | None = None, **given: Any) -> Launched:
        path, sections = tmp_path / "boxes.yaml", given.pop("sections", {})
        path.write_text(json.dumps(recipe_of(**sections)))
        profile = profile_of(tmp_path, hold_at, **(docker or {}))
        started.append(launch(path, "--on", str(profile), *arguments, cwd=tmp_path, **given))
        return started[-1]

    yield start
    folders = [folder for run in started for folder in run.runs.glob(f"{run.name}-*")]
    for pid in filter(None, (watcher_of(RunDir(folder)) for folder in folders)):
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.05)
        engine.tidy()


def holds(run: Launched) -> None:
    """Wait until both ranks are at the step that waits; checkpoints are behind them."""
    step = f'"step": {HOLD_AT}'
    ledgers = lambda: [path for path in run.run.path.glob("ledger-1-*") if step in path.read_text()]  # noqa: E731
    run.until(lambda: len(ledgers()) == 2, LIMIT_S)


def container(run: Launched, node: int) -> str:
    return f"{run.run_id}-node-{node}"


def go_on(run: Launched) -> None:
    (run.run.path / "go-on").touch()


def test_two_containers_train_what_two_agents_do_and_nothing_is_left(
    engine: Engine, boxes: Boxes, command: Command, reference: Reference
) -> None:
    run = boxes(hold_at=HOLD_AT, env={"WANDB_API_KEY": CANARY, "MY_TOKEN": CANARY},
                       sections={"secrets": ["MY_TOKEN"]})  # fmt: skip
    holds(run)
    seen = [engine.inspect(container(run, node)) for node in (0, 1)]
    planned = json.loads(run.run.plan.read_text())["hosts"]["nodes"]
    for node, box in enumerate(seen):
        assert planned[node]["start"][-len(box["Config"]["Cmd"]) :] == box["Config"]["Cmd"]
        labels = box["Config"]["Labels"]
        assert (labels["launcher.run"], labels["launcher.node"]) == (run.run_id, str(node))
        assert box["Config"]["User"] == f"{os.getuid()}:{os.getgid()}"
        host = box["HostConfig"]
        assert (host["Init"], host["SecurityOpt"]) == (True, ["no-new-privileges"])
        assert (host["IpcMode"], host["ShmSize"] >= 1 << 30) == ("private", True)
        assert box["Config"]["StopTimeout"] == 40
    status = json.loads(command("status", str(run.run.path), "--json").stdout)
    assert (status["state"], len(status["workers"])) == ("RUNNING", 2)
    inside = engine.docker("exec", container(run, 0), "sh", "-c", "ls -A /run/launch-secrets")
    assert "secrets.json" not in inside.stdout, "the agent has removed it"
    places = {
        "docker inspect": json.dumps(seen),
        "ps": subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout,
        "docker logs": "".join(engine.docker("logs", container(run, node)).stdout for node in (0, 1)),
    }
    go_on(run)
    assert run.wait(LIMIT_S) == 0
    places |= {str(path): path.read_text(errors="replace") for path in run.run.path.rglob("*") if path.is_file()}
    assert [name for name, text in places.items() if CANARY in text] == []
    criteria.assert_bit(run.run, reference)
    criteria.assert_once(run.run, reference)
    assert engine.left() == []
    assert list(Path("/dev/shm").glob(f"launch-*{run.run_id}*")) == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_container_that_is_killed_is_replaced_and_the_run_goes_on_exactly(
    engine: Engine, boxes: Boxes, command: Command, reference: Reference, node: int
) -> None:
    run = boxes(hold_at=HOLD_AT)
    holds(run)
    engine.docker("kill", container(run, node))
    run.wait_for_event("node_replaced", LIMIT_S, node=node)
    go_on(run)
    assert run.wait(LIMIT_S) == 0
    criteria.assert_bit(run.run, reference)
    criteria.assert_once(run.run, reference)
    said = command("report", str(run.run.path)).stdout
    assert (
        f"lost       node {node}: its container was killed by SIGKILL; another agent was started in its place" in said
    )


def test_docker_stop_of_one_container_saves_and_a_resume_goes_on_exactly(
    engine: Engine, boxes: Boxes, command: Command, reference: Reference
) -> None:
    run = boxes(hold_at=HOLD_AT)
    holds(run)
    stop = subprocess.Popen(["docker", "stop", container(run, 1)], stdout=subprocess.DEVNULL)
    run.wait_for_event("stop_requested", LIMIT_S)
    go_on(run)
    assert run.wait(LIMIT_S) == 75
    assert stop.wait(LIMIT_S) == 0
    assert (run.result["state"], run.result["cause"]) == ("CANCELLED", "cancelled")
    assert run.result["checkpoint"]["latest"] >= HOLD_AT - 1
    assert engine.left() == []
    resumed = command("resume", str(run.run.path))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    criteria.assert_bit(run.run, reference)
    criteria.assert_once(run.run, reference)


@pytest.mark.parametrize("how", ["cancel", "Ctrl-C"])
def test_a_request_to_stop_saves_and_leaves_no_container(engine: Engine, boxes: Boxes, how: str) -> None:
    detached = ["--detach"] if how == "cancel" else []
    run = boxes(*detached, hold_at=HOLD_AT)
    holds(run)
    if how == "cancel":
        cancel = subprocess.Popen([LAUNCH, "cancel", str(run.run.path)], stdout=subprocess.DEVNULL)
    else:
        run.signal(signal.SIGINT)
    run.wait_for_event("stop_requested", LIMIT_S)
    go_on(run)
    assert (cancel.wait(LIMIT_S) == 0) if how == "cancel" else (run.wait(LIMIT_S) == 75)
    assert (run.result["state"], run.result["exit_code"]) == ("CANCELLED", 75)
    assert engine.left() == []


def test_without_a_watcher_the_run_goes_on_and_another_one_takes_over(
    engine: Engine, boxes: Boxes, command: Command, reference: Reference
) -> None:
    run = boxes("--detach", hold_at=HOLD_AT)
    assert run.wait(LIMIT_S) == 0
    assert "launch watch" in run.text
    holds(run)
    pid = watcher_of(run.run)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: watcher_of(run.run) is None)
    assert json.loads(command("status", str(run.run.path), "--json").stdout)["state"] == "RUNNING"
    watching = subprocess.Popen([LAUNCH, "watch", str(run.run.path)], stdout=subprocess.PIPE, text=True)
    run.until(lambda: watcher_of(run.run) is not None)
    engine.docker("kill", container(run, 1))
    run.wait_for_event("node_replaced", LIMIT_S, node=1)
    go_on(run)
    said, _ = watching.communicate(timeout=LIMIT_S)
    assert (watching.returncode, "SUCCEEDED" in said) == (0, True)
    criteria.assert_bit(run.run, reference)
    criteria.assert_clean(lambda: {"engine": engine.left()})


def test_what_a_killed_watcher_leaves_goes_with_the_next_run_and_a_resume_goes_on(
    engine: Engine, boxes: Boxes, command: Command, reference: Reference
) -> None:
    lost = [boxes("--detach", hold_at=HOLD_AT) for _ in range(2)]
    for run in lost:
        assert run.wait(LIMIT_S) == 0
        holds(run)
        pid = watcher_of(run.run)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        engine.docker("kill", container(run, 0), container(run, 1))
        run.until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        status = json.loads(command("status", str(run.run.path), "--json").stdout)
        assert (status["state"], "it is gone" in status["sentence"]) == ("FAILED", True)
    assert len(engine.left()) == 6, "two containers and a network of each"
    go_on(lost[0])
    resumed = command("resume", str(lost[0].run.path))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    criteria.assert_bit(lost[0].run, reference)
    assert engine.left() == []
    assert [path for run in lost for path in Path("/dev/shm").glob(f"launch-*{run.run_id}*")] == []


def test_a_small_shared_memory_is_refused_before_the_training_with_the_key_to_set(engine: Engine, boxes: Boxes) -> None:
    data = {"loader_workers": 8, "samples": 4096, "shape": "3x224x224", "global_batch_size": 512}
    run = boxes(
        "--nodes",
        "1",
        docker={"shm_size": "64MiB"},
        sections={"data": data, "model": {"in_features": 150528}},
    )
    assert run.wait(LIMIT_S) != 0
    assert "docker.shm_size" in run.text
    assert "step 1/" not in run.text
    assert "Traceback" not in run.text


def test_files_of_a_run_belong_to_its_caller_whom_no_image_knows(engine: Engine, boxes: Boxes, tmp_path: Path) -> None:
    uid = 54321
    engine.folder.chmod(0o755)
    engine.socket.chmod(0o666)
    os.chown(tmp_path, uid, uid)
    for parent in [*tmp_path.parents][:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, uid, uid)
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")  # an interpreter may be in root's home
    prefix = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *reads)
    run = boxes(prefix=prefix, env={"HOME": str(home), "XDG_STATE_HOME": str(home)})
    assert run.wait(LIMIT_S) == 0, run.text
    owners = {path.stat().st_uid for path in [run.run.path, *run.run.path.rglob("*")]}
    assert owners == {uid}


REFUSALS = {
    "no image": ("docker.image=nobody/knows-this:1 docker.pull=never", r"there is no image nobody/knows-this:1"),
    "no registry": ("docker.image=127.0.0.1:9/none:1", r"the image 127.0.0.1:9/none:1|127.0.0.1:9"),
    "no folder": ("docker.mounts=[/no/such/folder]", r"there is no /no/such/folder"),
    "no network": ("docker.network=nobodys", r"there is no Docker network nobodys"),
    "no torch": (f"docker.mounts=[] docker.image={BASE}", r"has no torch"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_run_is_refused_in_a_sentence_and_leaves_nothing(engine: Engine, boxes: Boxes, what: str) -> None:
    overrides, sentence = REFUSALS[what]
    run = boxes(*overrides.split())
    assert run.wait(LIMIT_S) == 3, run.text
    assert re.search(sentence, run.text), run.text
    assert "hint:" in run.text
    assert "Traceback" not in run.text
    assert list(run.runs.glob("*")) == []
    assert engine.left() == []


def test_a_dead_daemon_is_refused_in_a_sentence_and_a_run_goes_on_without_one(
    engine: Engine, boxes: Boxes, reference: Reference
) -> None:
    run = boxes(hold_at=HOLD_AT)
    holds(run)
    engine.stop_daemon(signal.SIGKILL)
    try:
        run.wait_for_event("machine_silent", LIMIT_S, node=0)
        other = boxes()
        assert other.wait(LIMIT_S) == 3
        assert re.search("the Docker daemon of this machine does not answer", other.text), other.text
        assert "systemctl start docker" in other.text
        go_on(run)
        run.wait_for_event("finished", LIMIT_S)
        assert run.process.poll() is None, "its containers are still to be removed"
    finally:
        engine.start_daemon()
    assert run.wait(LIMIT_S) == 0
    criteria.assert_bit(run.run, reference)
    assert engine.left() == []


def test_the_engines_own_words_about_a_gpu_become_what_to_do(engine: Engine) -> None:
    refused = engine.docker("run", "--rm", "--gpus", "all", BASE, "true", check=False)
    problem = refusal(refused.stderr)
    assert "cannot give GPUs to a container" in problem.message
    assert "container toolkit" in problem.hint
