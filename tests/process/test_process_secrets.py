"""F060: a secret is in no file of ours, no log, no argument of a process, no plan and no W&B run."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launched import Launch, Launched

pytestmark = pytest.mark.process

CANARY = "canary07f3a9d2e51b8c60455aa66bb77cc88dd99ee00"
"""As long as a key of W&B's has to be."""
LICENCE = "licence-0815-cafe"
SECRETS = {"WANDB_API_KEY": CANARY, "LICENCE": LICENCE, "WANDB_BASE_URL": "http://127.0.0.1:9"}
"""A port where nobody answers."""
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"name": "mlp", "in_features": 8, "hidden": 8, "classes": 2},
    "data": {"name": "synthetic", "samples": 32, "eval_samples": 8, "shape": "8", "classes": 2, "global_batch_size": 8},
    "train": {"until": "8 steps", "optimizer": {"name": "adamw", "lr": 0.01}},
    "resources": {"nodes": 1, "nproc_per_node": 2, "threads": 1},
}
BABBLER = """
import base64, json, os, pathlib, sys, time
key, licence = os.environ["WANDB_API_KEY"], os.environ["LICENCE"]
print(key, licence)
print(json.dumps({"key": key}), base64.b64encode(f"api:{key}".encode()).decode(), file=sys.stderr)
os.write(1, f"half {key[:20]}".encode()); time.sleep(0.05); os.write(1, f"{key[20:]}\\n".encode())
os.write(1, b"x" * ((1 << 20) - 10) + key.encode() * 3 + b"\\n")
run = pathlib.Path(os.environ["LAUNCH_RUN_DIR"])
note = run / f"up.{os.environ['RANK']}.1"
note.with_suffix(".tmp").write_text(str(os.getpid()))
note.with_suffix(".tmp").rename(note)  # whole or not there
while not (run / "go").exists():
    time.sleep(0.005)
raise RuntimeError(f"401 for {key}, {licence}")
"""
Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with the secret in a changed file and in a new one, and the secret in the environment."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "settings.py").write_text("KEY = None\n")
    (folder / "babbler.py").write_text(BABBLER)
    (folder / "tiny.yaml").write_text(json.dumps(TINY))
    recipe = {"name": "b", "script": "babbler.py", "workdir": ".", "secrets": ["LICENCE"], "resources": {"threads": 1}}
    (folder / "b.yaml").write_text(json.dumps({**recipe, "preload": True}))
    who = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    (folder / "settings.py").write_text(f"KEY = '{CANARY}'\n")
    (folder / "notes.txt").write_text(CANARY)
    return folder


def forms() -> list[bytes]:
    """What to look for: the values, and parts that are in every encoding of them."""
    encoded = base64.b64encode(f"api:{CANARY}".encode())
    return [CANARY.encode(), CANARY[:20].encode(), CANARY[25:].encode(), LICENCE.encode(), encoded[8:40]]


def hits(folder: Path) -> Iterator[str]:
    """Files below a folder that hold a secret."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and any(form in path.read_bytes() for form in forms()):
            yield str(path)


def argument_hits(run_id: str) -> list[str]:
    """Command lines of the processes of a run that hold a secret."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if f"LAUNCH_RUN_ID={run_id}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes())
        except OSError:
            continue
    assert found, "no process of the run was looked at"
    return [line.decode() for line in found if any(form in line for form in forms())]


def check_nothing_is_kept(run: Launched, tmp_path: Path) -> None:
    assert list(hits(run.run.path)) == []
    assert list(hits(tmp_path / "state")) == []
    assert not any(form in run.text.encode() for form in forms())


def test_the_built_in_job_with_a_key_and_no_server_keeps_the_key_to_itself(
    launch: Launch, tree: Path, tmp_path: Path, command: Command
) -> None:
    run = launch(tree / "tiny.yaml", "train.until=1000000 steps", cwd=tree)
    run.wait_for_event("tracking")
    assert argument_hits(run.run_id) == [], "W&B's own processes are among them"
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    check_nothing_is_kept(run, tmp_path)
    assert list((run.run.path / "wandb").rglob("*.wandb")), "W&B has written nothing that could hold it"
    record = json.loads(run.run.launch.read_text())
    assert "***WANDB_API_KEY***" in record["git"]["diff"]
    for words in (["report"], ["status"], ["explain"], ["logs"]):
        shown = command(*words, run.run_id)
        assert not any(form in (shown.stdout + shown.stderr).encode() for form in forms())


def test_a_script_that_prints_and_raises_its_secrets_leaves_none_of_them(
    launch: Launch, tree: Path, tmp_path: Path, command: Command
) -> None:
    options = ("--nproc-per-node", "2")
    shown = [command(str(tree / "b.yaml"), "--dry-run", *more) for more in ([], ["-v"], ["--json"])]
    for dry in shown:
        assert dry.returncode == 0, dry.stderr
        assert not any(form in (dry.stdout + dry.stderr).encode() for form in forms())
    assert "LICENCE" in shown[0].stdout
    assert "holds the value of a secret" in shown[0].stdout

    runs = [launch(tree / "b.yaml", *options, f"preload={word}", cwd=tree) for word in ("true", "false")]
    for run in runs:
        run.wait_for_marks("up", ranks=2)
        assert argument_hits(run.run_id) == []
        check_nothing_is_kept(run, tmp_path)
        run.let("go")
    for run in runs:
        assert run.wait() == 1, run.text
        check_nothing_is_kept(run, tmp_path)
        assert "***WANDB_API_KEY*** ***LICENCE***" in run.log(0)
        assert "half ***WANDB_API_KEY***" in run.log(0)
        assert "401 for ***WANDB_API_KEY***, ***LICENCE***" in run.result["first_failure"]["message"]
        assert "***WANDB_API_KEY***" in run.text
        assert not run.run.code.exists(), "files with a secret in them were copied"
        assert stat.S_IMODE(run.run.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(run.run.token.stat().st_mode) == 0o600


def test_a_secret_among_the_arguments_is_refused_and_not_repeated(tree: Path, tmp_path: Path, command: Command) -> None:
    done = command(str(tree / "babbler.py"), "--runs-dir", str(tmp_path / "runs"), "--", "--key", CANARY)
    assert done.returncode == 2, done.stderr
    assert "WANDB_API_KEY" in done.stderr
    assert not any(form in (done.stdout + done.stderr).encode() for form in forms())
    assert not (tmp_path / "runs").exists()
    assert list(hits(tmp_path / "state")) == []


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_copy_of_code_is_for_its_owner_alone(launch: Launch, tree: Path, mask: int) -> None:
    subprocess.run(["git", "-C", str(tree), "checkout", "-q", "settings.py"], check=True)
    (tree / "notes.txt").unlink()
    (tree / ".env").write_text(CANARY)
    (tree / "quick.py").write_text("import settings\nprint('done')\n")
    before = os.umask(mask)
    try:
        run = launch(tree / "quick.py", cwd=tree)
        assert run.wait() == 0, run.text
    finally:
        os.umask(before)
    assert (run.run.code / "quick.py").is_file()
    assert list(hits(run.run.path)) == []
    assert stat.S_IMODE(run.run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.run.token.stat().st_mode) == 0o600
    for path in run.run.path.rglob("*"):
        assert path.is_symlink() or not stat.S_IMODE(path.stat().st_mode) & 0o022, f"others may write {path}"
