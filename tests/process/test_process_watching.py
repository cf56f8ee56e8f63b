"""What is seen of a run beside its training: devices while it goes on, nsys before a worker, and what comes after."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launched import Launch, Launched, Recipe
from safetensors.torch import load_file
from tiny import tiny

from launcher.runs.devices import measured_nodes, newest_of, read_measured

pytestmark = pytest.mark.process

Command = Callable[..., CompletedProcess[str]]

WAITS = """
import toy
toy.mark("begun")
toy.wait_for("go")
"""

FAKE_NSYS = """#!/bin/sh
printf '%s\\n' "$@" > "$NSYS_SAW"
while case "$1" in -*|profile) true;; *) false;; esac; do shift; done
exec "$@"
"""


def lines(run: Launched, node: int) -> int:
    path = measured_nodes(run.run).get(node)
    return 0 if path is None else len(list(read_measured(path)))


def measuring(run: Launched) -> list[str]:
    """The processes that measure for this run."""
    commands = [path.read_text(errors="replace") for path in Path("/proc").glob("[1-9]*/cmdline") if path.exists()]
    return [each for each in commands if "--devices" in each and f'"{run.run.path}/devices/' in each]


def test_every_node_measures_its_devices_while_the_run_goes_on(
    launch: Launch, recipe: Recipe, command: Command
) -> None:
    """An agent that is killed takes its measuring process along; the one that replaces it goes on measuring."""
    path = recipe(WAITS, nodes=2, nproc=1, resume="self", tracking={"watch": "200ms"})
    run = launch(path)
    run.wait_for_marks("begun", 2)
    run.until(lambda: lines(run, 0) > 1 and lines(run, 1) > 1)
    found = newest_of(run.run.devices(1))
    assert found is not None
    assert {"cpu/util", "memory/used_bytes", "workers/cpu_util", "workers/rss_bytes"} <= found.keys()
    said = command("status", run.run_id)
    assert "  use 1     cpu " in said.stdout
    assert json.loads(command("status", run.run_id, "--json").stdout)["devices"].keys() == {"0", "1"}
    (agent,) = run.happened("agent_started", node=1)
    os.kill(agent["pid"], signal.SIGKILL)
    run.wait_for_marks("begun", 2, attempt=2)
    before = lines(run, 1)
    run.until(lambda: lines(run, 1) > before + 1)
    assert len(measuring(run)) == 2
    run.let("go")
    assert run.wait() == 0
    said = command("report", run.run_id)
    assert [line.split()[:2] for line in said.stdout.splitlines() if line.startswith("node ")] == [
        ["node", "0"],
        ["node", "1"],
    ]


def test_nsys_is_put_before_the_ranks_that_are_named_and_the_model_is_used_afterwards(
    launch: Launch, tmp_path: Path, command: Command
) -> None:
    """The training under nsys is the same; then it is evaluated, exported and compared."""
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(FAKE_NSYS)
    nsys.chmod(0o755)
    source = tmp_path / "tiny.yaml"
    sections = {"train": {"until": "20 steps"}, "resources": {"nodes": 1, "nproc_per_node": 2, "threads": 1}}
    source.write_text(json.dumps(tiny(**sections)))
    env = {"PATH": f"{nsys.parent}{os.pathsep}{os.environ['PATH']}", "NSYS_SAW": str(tmp_path / "saw")}
    plain, profiled = (
        launch(source),
        launch(source, "profiler={tool: nsys, ranks: [1]}", "tracking.watch=null", env=env),
    )
    assert (plain.wait(), profiled.wait()) == (0, 0), profiled.text
    saw = (tmp_path / "saw").read_text().splitlines()
    assert saw[:3] == ["profile", f"--output={profiled.run.path}/profile/attempt-1-rank-1", "--force-overwrite=true"]
    assert saw[-2:] == ["--job", "jobs.train"]
    assert not profiled.run.devices(0).exists()

    found = json.loads(command("diff", plain.run_id, profiled.run_id, "--json").stdout)
    assert (found["loss"]["steps"], found["loss"]["first"]) == (20, None)
    assert found["course"]["step (median)"][0] > 0
    assert found["metrics"]["weights_sha256"][0] == found["metrics"]["weights_sha256"][1]

    said = command("eval", profiled.run_id)
    assert said.returncode == 0, said.stderr
    assert "  eval/loss " in said.stdout
    assert said.stdout.count("as in the training") == len(said.stdout.splitlines()) - 1
    (kept,) = (json.loads(line) for line in profiled.run.evals.read_text().splitlines())
    assert kept["metrics"] == kept["recorded"] == profiled.result["metrics"]
    refused = command("eval", profiled.run_id, "train.seed=3", "model.hidden=7", "data.samples=8")
    assert refused.returncode == 2
    assert "train.seed=3: train.seed belongs to the training" in refused.stderr
    assert "model.hidden=7: model.hidden belongs to the training" in refused.stderr

    out = tmp_path / "model"
    said = command("export", profiled.run_id, "--out", str(out), "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["weights_sha256"] == profiled.result["weights_sha256"]
    assert sorted(path.name for path in out.iterdir()) == ["metrics.json", "model.safetensors", "recipe.yaml"]
    assert len(load_file(out / "model.safetensors")) == json.loads(said.stdout)["tensors"]
    again = command("export", profiled.run_id, "--out", str(out))
    assert (again.returncode, "is there, and not empty" in again.stderr) == (3, True)
