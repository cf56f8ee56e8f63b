"""What the tests of faults hold a run to, against the same run undisturbed.

BIT     the weights and what was recorded of each step are equal, bit by bit
ONCE    each step has trained on the samples that it should, and so each sample comes once per epoch
CLEAN   no process, no file in /dev/shm, no port is left
CODE    the exit code is the documented one

What a rank has trained on is written by a `sitecustomize` of these tests, which agents import, and their workers have.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launched import LAUNCH, LIMIT_S
from outermost import OUTERMOST

from launcher.runs.metrics import read_metrics
from launcher.runs.rundir import RunDir

CLEAN_S = 10.0
"""How long what belongs to a run may outlive it."""
BITS = ("train/loss", "train/lr", "samples_seen", "eval/loss", "eval/accuracy")

SITECUSTOMIZE = (
    OUTERMOST
    + r"""
import hashlib, json, os, re, sys, time

SLOW_S = float(os.environ.get("TEST_STEP_S", "0"))
HOLD_AT = int(os.environ.get("TEST_HOLD_AT", "0"))

def saw(module, inputs):
    # Of each micro-batch: which samples, in which step. The trainer is who has called, and knows the step.
    if "LAUNCH_RUN_DIR" not in os.environ or not outermost():
        return
    frame = sys._getframe(1)
    while frame is not None and type(frame.f_locals.get("self")).__name__ != "Trainer":
        frame = frame.f_back
    if frame is None or not module.training or frame.f_code.co_name not in ("_gradients", "_step"):
        return  # a rehearsal, an evaluation
    samples = [hashlib.blake2b(sample.numpy().tobytes(), digest_size=6).hexdigest() for sample in inputs[0]]
    attempt, rank = os.environ["LAUNCH_ATTEMPT"], os.environ["RANK"]
    line = {"attempt": int(attempt), "step": frame.f_locals["self"].progress.step + 1, "samples": samples}
    with open(os.path.join(os.environ["LAUNCH_RUN_DIR"], f"ledger-{attempt}-{rank}"), "a") as ledger:
        ledger.write(json.dumps(line) + "\n")
    time.sleep(SLOW_S)
    while line["step"] == HOLD_AT and not os.path.exists(os.path.join(os.environ["LAUNCH_RUN_DIR"], "go-on")):
        time.sleep(0.02)

if re.search(r"launcher[.]agent|/agent/start[.]py", " ".join(sys.orig_argv)):
    from torch.nn.modules.module import register_module_forward_pre_hook
    register_module_forward_pre_hook(saw)
"""
)


def install(folder: Path) -> dict[str, str]:
    """Write the `sitecustomize`; the environment that makes agents import it."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {"PYTHONPATH": str(folder)}


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbed."""

    weights_sha256: str
    recorded: Mapping[int, tuple[str, ...]]
    losses: Mapping[int, float]
    trained_on: Mapping[int, Counter[str]]
    samples: int
    """Different ones that it has trained on."""

    @property
    def steps(self) -> int:
        """How many it has made."""
        return len(self.recorded)


def undisturbed(folder: Path, recipe: Mapping[str, Any], *, nodes: int) -> Reference:
    """Run a recipe on so many nodes of this machine, to its end."""
    env = install(folder)
    path = folder / "undisturbed.yaml"
    path.write_text(json.dumps(recipe))
    argv = [LAUNCH, str(path), "--nodes", str(nodes), "--runs-dir", str(folder / "undisturbed"), "--json"]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(Path(json.loads(done.stdout.splitlines()[-1])["run_dir"]))
    trained_on = ledger(run)
    samples = {sample for counted in trained_on.values() for sample in counted}
    reference = Reference(
        weights_sha256=json.loads(run.result.read_text())["weights_sha256"],
        recorded=recorded(run),
        losses=losses(run),
        trained_on=trained_on,
        samples=len(samples),
    )
    assert sorted(reference.trained_on) == sorted(reference.recorded), "the ledger has every step"
    return reference


def recorded(run: RunDir) -> dict[int, tuple[str, ...]]:
    """What was recorded of each step, bit by bit."""
    return {
        record["step"]: tuple(float(record[name]).hex() for name in BITS if record.get(name) is not None)
        for record in read_metrics(run.metrics)
    }


def losses(run: RunDir) -> dict[int, float]:
    """The loss of each step."""
    return {record["step"]: record["train/loss"] for record in read_metrics(run.metrics)}


def ledger(run: RunDir) -> dict[int, Counter[str]]:
    """The samples of each step over all ranks, in the newest attempt that has made it."""
    lines = [json.loads(line) for path in run.path.glob("ledger-*") for line in path.read_text().splitlines()]
    newest: dict[int, int] = {}
    for line in lines:
        newest[line["step"]] = max(newest.get(line["step"], 0), line["attempt"])
    found: dict[int, Counter[str]] = {step: Counter() for step in newest}
    for line in lines:
        if line["attempt"] == newest[line["step"]]:
            found[line["step"]].update(line["samples"])
    return found


def made_twice(run: RunDir) -> list[int]:
    """Steps that more than one attempt has made to their end: these were lost. A step that was cut off in its middle
    is begun again, which loses nothing; only metrics.jsonl says which ones were completed."""
    seen: Counter[int] = Counter()
    for line in run.metrics.read_text().splitlines():
        record = json.loads(line)
        if "train/loss" in record:
            seen[record["step"]] += 1
    return sorted(step for step, times in seen.items() if times > 1)


def assert_bit(run: RunDir, reference: Reference) -> None:
    """BIT."""
    assert recorded(run) == reference.recorded
    assert json.loads(run.result.read_text())["weights_sha256"] == reference.weights_sha256


def assert_close(run: RunDir, reference: Reference, *, until: int, near: int = 20, relative: float = 1e-4) -> None:
    """Equal up to a step. For some steps more, where sums are made in another order, close; later on the difference of
    a last bit has grown to any size."""
    found, known = losses(run), reference.losses
    assert sorted(found) == sorted(known)
    before = [step for step in sorted(known) if step <= until]
    assert [found[step] for step in before] == [known[step] for step in before]
    after = [step for step in sorted(known) if until < step <= until + near]
    assert after, f"nothing is left to be compared after step {until}"
    assert [found[step] for step in after] == pytest.approx([known[step] for step in after], rel=relative)


def assert_once(run: RunDir, reference: Reference) -> None:
    """ONCE."""
    found = ledger(run)
    assert sorted(found) == sorted(reference.trained_on)
    wrong = [step for step in sorted(found) if found[step] != reference.trained_on[step]]
    assert not wrong, f"steps {wrong[:5]} have trained on other samples than they should"


def assert_clean(look: Callable[[], Mapping[str, object]], limit_s: float = CLEAN_S) -> None:
    """CLEAN: soon nothing is left of all that `look` finds."""
    deadline_s = time.monotonic() + limit_s
    while left := {name: what for name, what in look().items() if what}:
        assert time.monotonic() < deadline_s, f"left {limit_s:g} s after the end: {left}"
        time.sleep(0.05)
