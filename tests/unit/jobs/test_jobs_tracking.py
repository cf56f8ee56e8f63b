from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.metrics import MetricsLog
from jobs.trackers import choose_mode
from launcher.runs.events import read_events
from launcher.runs.rundir import RunDir

FAKE_WANDB = """
import json, os, sys, time
class errors:
    class Error(Exception): ...
class Settings(dict):
    def __init__(self, **kw): super().__init__(kw)
def note(**kw):
    with open(os.environ["FAKE_WANDB"], "a") as file: file.write(json.dumps(kw) + "\\n")
class Run:
    dir = "/nowhere/files"; url = "http://fake"
    def __init__(self, id): self.id = id
    def define_metric(self, *a, **kw): ...
    def log(self, values):
        if os.environ.get("FAKE_FAIL") == "log": raise RuntimeError("disk on fire")
        note(log=values)
    def finish(self, exit_code): note(finish=exit_code)
def init(**kw):
    note(init={key: kw[key] for key in ("id", "mode", "resume", "project", "config")})
    time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
    return Run(kw["id"])
"""


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "demo-run"
    path.mkdir()
    return path


def follow(run_dir: Path, *, attempt: int = 1, tensorboard: bool = False, **env: str) -> subprocess.Popen[str]:
    order = {
        "run_dir": str(run_dir),
        "run_id": run_dir.name,
        "attempt": attempt,
        "name": "demo",
        "wandb": {"mode": "auto", "project": None, "entity": None, "tags": []},
        "tensorboard": tensorboard,
        "config": {"train": {"seed": 0}},
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.follower"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(run_dir.parent), **env},
    )
    say(process, order)
    return process


def say(process: subprocess.Popen[str], order: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str], exit_code: int | None = 0) -> str:
    if exit_code is not None:
        say(process, {"finish": exit_code})
    output, _ = process.communicate(timeout=60)
    return output


def fake(tmp_path: Path, **env: str) -> dict[str, str]:
    (tmp_path / "fake").mkdir(exist_ok=True)
    (tmp_path / "fake" / "wandb.py").write_text(FAKE_WANDB)
    path = os.pathsep.join([str(tmp_path / "fake"), *filter(None, sys.path)])
    return {"PYTHONPATH": path, "FAKE_WANDB": str(tmp_path / "calls"), "WANDB_MODE": "offline", **env}


def calls(tmp_path: Path, name: str) -> list[Any]:
    lines = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def write(run_dir: Path, *steps: int, attempt: int = 1, resumed_from: int = 0) -> None:
    log = MetricsLog(run_dir / "metrics.jsonl", attempt=attempt, resumed_from=resumed_from)
    for step in steps:
        log.write(step, **{"train/loss": step / 10, "samples_seen": step})
    log.close()


def test_one_run_over_all_attempts_and_each_step_once(run_dir: Path, tmp_path: Path) -> None:
    """F005: one W&B id; what was sent is not sent again, what was not is made up for."""
    write(run_dir, 1, 2, 3)
    end(follow(run_dir, **fake(tmp_path)))
    write(run_dir, 3, 4, attempt=2, resumed_from=2)
    end(follow(run_dir, attempt=2, **fake(tmp_path)), exit_code=75)
    assert {(init["id"], init["resume"]) for init in calls(tmp_path, "init")} == {("demo-run", "allow")}
    assert calls(tmp_path, "init")[0]["config"] == {"train": {"seed": 0}}
    assert [values["step"] for values in calls(tmp_path, "log")] == [1, 2, 3, 4]
    assert calls(tmp_path, "finish") == [0, 75]


def measured(run_dir: Path, node: int, *lines: dict[str, Any]) -> None:
    path = RunDir(run_dir).devices(node)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_what_nodes_have_measured_is_logged_once_at_the_step_of_its_time(run_dir: Path, tmp_path: Path) -> None:
    write(run_dir, 1, 2)
    after_s = time.time() + 1
    measured(run_dir, 0, {"time": 1.0, "cpu/util": 5.0, "note": "no GPU"}, {"time": after_s, "gpu0/util": 98})
    end(follow(run_dir, **fake(tmp_path)))
    measured(run_dir, 1, {"time": after_s, "cpu/util": 7.0})
    end(follow(run_dir, attempt=2, **fake(tmp_path)))
    of_nodes = [values for values in calls(tmp_path, "log") if any(name.startswith("node") for name in values)]
    assert of_nodes == [
        {"step": 0, "node0/cpu/util": 5.0},
        {"step": 2, "node0/gpu0/util": 98},
        {"step": 2, "node1/cpu/util": 7.0},
    ]


def test_an_attempt_that_is_online_makes_up_for_those_that_were_not(
    run_dir: Path, tmp_path: Path, silent_server: str
) -> None:
    """F062: what lies in an offline folder is not at the server yet; what is there is not written offline again."""
    online = {"WANDB_MODE": "online", "WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": silent_server}
    write(run_dir, 1, 2)
    end(follow(run_dir, **fake(tmp_path)))
    write(run_dir, 3, attempt=2, resumed_from=2)
    end(follow(run_dir, attempt=2, **fake(tmp_path, **online)))
    write(run_dir, 4, attempt=3, resumed_from=3)
    end(follow(run_dir, attempt=3, **fake(tmp_path)))
    assert [values["step"] for values in calls(tmp_path, "log")] == [1, 2, 1, 2, 3, 4]
    assert [init["mode"] for init in calls(tmp_path, "init")] == ["offline", "online", "offline"]


def test_what_a_dead_training_left_is_sent(run_dir: Path, tmp_path: Path) -> None:
    write(run_dir, 1, 2)
    end(follow(run_dir, **fake(tmp_path)), exit_code=None)
    assert [values["step"] for values in calls(tmp_path, "log")] == [1, 2]
    assert calls(tmp_path, "finish") == [1]


def test_lines_are_sent_as_they_come(run_dir: Path, tmp_path: Path) -> None:
    write(run_dir, 1)
    process = follow(run_dir, **fake(tmp_path))
    deadline = time.monotonic() + 30
    while not (tmp_path / "calls").exists() or not calls(tmp_path, "log"):
        assert time.monotonic() < deadline
    assert process.poll() is None
    end(process)


def test_a_tracker_that_raises_is_said_once(run_dir: Path, tmp_path: Path) -> None:
    write(run_dir, 1)
    output = end(follow(run_dir, **fake(tmp_path, FAKE_FAIL="log")))
    assert "tracking ended early (RuntimeError: disk on fire); metrics.jsonl has everything" in output


def test_offline_with_the_real_package(run_dir: Path) -> None:
    """Without a key: offline, said in one line, with the line that uploads it. TensorBoard beside it."""
    write(run_dir, 1, 2, 3)
    output = end(follow(run_dir, tensorboard=True))
    assert output.splitlines()[0] == f"W&B    offline (no key): wandb sync {run_dir}/wandb/offline-run-*"
    assert len(list(run_dir.glob("wandb/offline-run-*/run-demo-run.wandb"))) == 1
    assert len(list(run_dir.glob("tensorboard/events.out.tfevents.*"))) == 1
    [event] = read_events(run_dir)
    assert event["wandb"]["mode"] == "offline"
    assert event["wandb"]["id"] == "demo-run"
    assert event["wandb"]["sync"] == f"wandb sync {run_dir}/wandb/offline-run-*"


def test_the_mode_follows_recipe_environment_key_and_server(silent_server: str, tmp_path: Path) -> None:
    home = {"NETRC": str(tmp_path / "netrc")}
    key = {**home, "WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": silent_server}
    assert choose_mode("auto", home) == ("offline", "no key")
    assert choose_mode("auto", key) == ("online", "")
    assert choose_mode("auto", {**key, "WANDB_MODE": "offline"}) == ("offline", "as asked")
    assert choose_mode("online", {**key, "WANDB_MODE": "offline"}) == ("online", "")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    assert choose_mode("auto", {**home, "WANDB_BASE_URL": silent_server}) == ("online", "")
    closed = choose_mode("auto", {**key, "WANDB_BASE_URL": "http://127.0.0.1:9"})
    assert closed[0] == "offline"
    assert "127.0.0.1:9 does not answer" in closed[1]


def test_of_a_fast_training_a_tracker_gets_ten_points_a_second_and_the_last(run_dir: Path, tmp_path: Path) -> None:
    """After the first 256. What was evaluated is always sent, and a restart begins with the rest."""

    def lines(steps: range, attempt: int) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = [{"attempt": attempt, "resumed_from": steps.start - 1}]
        for step in steps:
            line = {"attempt": attempt, "step": step, "train/loss": 0.1, "time": round(1000 + step / 100, 3)}
            made.append(line)
            if step == 777:
                made.append({"attempt": attempt, "step": step, "eval/loss": 0.2, "time": line["time"]})
        return made

    def write_lines(steps: range, attempt: int) -> None:
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines(steps, attempt))

    write_lines(range(1, 1000), attempt=1)
    end(follow(run_dir, **fake(tmp_path)))
    sent = [values["step"] for values in calls(tmp_path, "log")]
    assert sent[:256] == list(range(1, 257))
    assert sent == sorted(set(sent))
    later = [step for step in sent if step > 300]
    assert len(later) == pytest.approx(70, abs=3)
    assert {777, 999} <= set(later)
    write_lines(range(1000, 1010), attempt=2)
    end(follow(run_dir, attempt=2, **fake(tmp_path)))
    assert [values["step"] for values in calls(tmp_path, "log")][len(sent) :] == list(range(1000, 1010))
