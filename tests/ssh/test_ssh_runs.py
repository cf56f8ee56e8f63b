"""Real runs over real ssh: hosts in namespaces of their own, which see one run directory, as on a cluster."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import LIMIT_S, Launch, Launched, Recipe
from ssh_hosts import MakeSshBed, SshBed
from tiny import tiny

pytestmark = [pytest.mark.process, pytest.mark.needs("ssh"), pytest.mark.timeout(240)]

MAIN = Path(__file__).parents[2] / "recipes" / "mnist_ddp.yaml"
STEPS = 1200


def small(folder: Path, *, steps: int = STEPS, **sections: object) -> Path:
    path = folder / "tiny.yaml"
    train = {"until": f"{steps} steps", "eval_every": None}
    made = tiny(train=train, checkpoint={"every": "100 steps"}, resources={"threads": 1}, **sections)
    path.write_text(json.dumps(made))
    return path


def on_hosts(launch: Launch, bed: SshBed, target: Path, *arguments: str, nodes: int = 2) -> Launched:
    place = ("--nodes", str(nodes), "--on", str(bed.profile))
    return launch(target, *place, *arguments, prefix=bed.calling())


def weights_here(launch: Launch, target: Path, *arguments: str) -> str:
    """Of the same on this machine."""
    run = launch(target, "--nodes", "2", "--on", "local", *arguments)
    assert run.wait() == 0, run.text
    return str(run.result["weights_sha256"])


def wait_for_step(run: Launched, step: int) -> None:
    def has_come() -> bool:
        path = run.run.metrics
        lines = path.read_bytes().splitlines()[:-1] if path.exists() else []
        return bool(lines) and int(json.loads(lines[-1]).get("step", 0)) >= step

    run.until(has_come)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Also of what comes after the end of the agents, which `Launched.until` takes for the end of all."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def is_idle(bed: SshBed) -> bool:
    return all(bed.busy(host) == [] and host.shared_memory() == [] for host in bed.hosts if host.is_up)


def test_the_main_recipe_has_the_weights_of_one_machine(make_ssh_bed: MakeSshBed, launch: Launch) -> None:
    bed = make_ssh_bed(2)
    short = ("train.until=40 steps", "tracking.wandb.mode=disabled")
    run = on_hosts(launch, bed, MAIN, *short)
    assert run.wait() == 0, run.text
    assert run.result["weights_sha256"] == weights_here(launch, MAIN, *short)
    started = {event["node"]: event["host"] for event in run.happened("node_bound")}
    assert started == {0: "h0", 1: "h1"}
    assert is_idle(bed)
    assert not run.run.hosts.exists(), "who the agents were is forgotten"


def test_a_link_that_is_cut_for_a_while(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = make_ssh_bed(2), small(tmp_path, steps=1500)
    run = on_hosts(launch, bed, target)
    wait_for_step(run, 150)
    bed.hosts[1].cut()
    run.wait_for_event("restarting")
    bed.hosts[1].mend()
    assert run.wait() == 0, run.text
    assert run.result["restarts"] == 1
    assert run.result["weights_sha256"] == weights_here(launch, target)
    assert is_idle(bed)


def test_an_agent_that_is_killed_is_replaced(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = make_ssh_bed(2), small(tmp_path)
    run = on_hosts(launch, bed, target)
    wait_for_step(run, 150)
    first = next(event for event in run.happened("supervisor_started") if event["host"] == "h1")
    bed.hosts[1].signal(first["pid"], signal.SIGKILL)
    run.wait_for_event("node_replaced", node=1)
    assert run.wait() == 0, run.text
    assert run.result["weights_sha256"] == weights_here(launch, target)
    assert "node 1" in bed.call("report", run.run_id).stdout
    assert is_idle(bed)


def test_cancel_leaves_a_checkpoint_and_nothing_else(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = make_ssh_bed(2), small(tmp_path, steps=100_000)
    run = on_hosts(launch, bed, target, "--detach")
    assert run.wait() == 0, run.text
    wait_for_step(run, 50)
    status = json.loads(bed.call("status", run.run_id, "--json").stdout)
    assert (status["state"], len(status["workers"])) == ("RUNNING", 2)
    assert "step 50/" in bed.call("logs", run.run_id).stdout
    assert bed.call("cancel", run.run_id).returncode in (0, 75)
    wait_until(lambda: run.run.result.exists() and is_idle(bed) and not run.run.watcher.exists(), run.text)
    assert (run.result["state"], run.result["exit_code"]) == ("CANCELLED", 75)
    assert run.result["checkpoint"]["latest"] == run.result["step"]


def test_ctrl_c_at_the_launch(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = make_ssh_bed(2), small(tmp_path, steps=100_000)
    run = on_hosts(launch, bed, target)
    wait_for_step(run, 50)
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.text
    wait_until(lambda: is_idle(bed), run.text)


def test_a_launch_that_is_killed_does_not_hurt_the_run(
    make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path
) -> None:
    bed, target = make_ssh_bed(2), small(tmp_path)
    run = on_hosts(launch, bed, target)
    wait_for_step(run, 50)
    run.signal(signal.SIGKILL)
    run.process.wait()
    wait_until(lambda: run.run.result.exists() and is_idle(bed) and not run.run.watcher.exists(), run.text)
    assert run.result["state"] == "SUCCEEDED"
    assert run.result["restarts"] == 0


def test_a_run_goes_on_on_other_hosts(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = make_ssh_bed(4), small(tmp_path, steps=4000)
    bed.write_profile(hosts=["h0", "h1"])
    run = on_hosts(launch, bed, target)
    wait_for_step(run, 150)
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.text
    bed.write_profile(hosts=["h2", "h3"])
    done = bed.call("resume", run.run_id, "--on", str(bed.profile))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event["host"] for event in run.happened("node_bound")][-2:] != ["h0", "h1"]
    assert run.result["weights_sha256"] == weights_here(launch, target)
    assert is_idle(bed)


def test_no_secret_is_seen(make_ssh_bed: MakeSshBed, launch: Launch, recipe: Recipe) -> None:
    bed, canary = make_ssh_bed(1), "canary-4f1d9e77"
    source = "import os, toy\ntoy.mark('has.' + str(len(os.environ['CANARY'])))\ntoy.wait_for('go')\n"
    target = recipe(source, nodes=1, nproc=1, secrets=["CANARY"])
    run = launch(target, "--on", str(bed.profile), prefix=bed.calling(), env={"CANARY": canary})
    run.wait_for_marks(f"has.{len(canary)}", 1)
    seen = [*bed.busy(bed.hosts[0]), *_lines_here()]
    run.let("go")
    assert run.wait() == 0, run.text
    assert seen
    assert not [line for line in seen if canary in line]
    holding = [path for path in run.run.path.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert holding == []


def _lines_here() -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return found


def test_a_host_that_is_gone_for_good(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = make_ssh_bed(2), small(tmp_path, steps=1000)
    run = launch(target, "--nodes", "1:2", "--on", str(bed.profile), prefix=bed.calling())
    wait_for_step(run, 150)
    bed.hosts[1].kill()
    assert run.wait() == 0, run.text
    assert run.result["world_size"] == 1
    assert "h1: " in run.text, "that it does not answer is said"
    assert is_idle(bed)
