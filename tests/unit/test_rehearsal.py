"""What a rehearsal makes of what its runs left behind. The runs themselves: tests/process/test_process_try.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.try_ import FAULTS
from launcher.rehearsal import checks
from launcher.rehearsal.checks import Check, Result
from launcher.rehearsal.plays import Fault
from launcher.rehearsal.stage import Stage, TooLateError

STEPS = 4


def records(**changed: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Steps 1 to 4; `s3={...}` changes the third, None leaves it out."""
    plain = [{"step": n, "train/loss": 2.0 / n, "samples_seen": 8 * n, "time": float(n)} for n in range(1, STEPS + 1)]
    found = [{**record, **(changed.get(f"s{record['step']}") or {})} for record in plain]
    return [record for record in found if changed.get(f"s{record['step']}", {}) is not None]


def test_of_equal_runs_every_check_passes() -> None:
    calm = records()
    made = [
        checks.trained_check(calm, STEPS, 0, 3.0),
        checks.losses_check(calm, records(), exact=True),
        checks.samples_check(calm, records()),
        checks.weights_check("ab" * 32, "ab" * 32, exact=True),
        checks.exit_check("after TERM", 75, 75),
        checks.leftovers_check([], []),
    ]
    assert checks.is_pass(made)
    assert checks.verdict_line(made, 61.0) == "PASS in 1m01s: 6 checks passed"


@pytest.mark.parametrize(
    ("check", "evidence"),
    [
        (checks.trained_check(records(s4=None), STEPS, 0, 3.0), "exit 0 after 3 of 4 steps"),
        (checks.trained_check(records(), STEPS, 1, 3.0), "exit 1 after 4 of 4 steps"),
        (
            checks.losses_check(records(), records(s3={"train/loss": 0.6666666666666667}), exact=True),
            "step 3: 0.6666666666666666 undisturbed, 0.6666666666666667 disturbed",
        ),
        (checks.losses_check(records(), records(s2=None), exact=True), "step 2 is in one of the two runs only"),
        (checks.losses_check(records(s2=None), records(), exact=True), "step 2 is in one of the two runs only"),
        (
            checks.losses_check(records(), records(s3={"train/loss": 0.67}), exact=False),
            "step 3: 0.6666666666666666 undisturbed, 0.67 disturbed",
        ),
        (
            checks.samples_check(records(), records(s3={"samples_seen": 32})),
            "step 3: 24 seen undisturbed, 32 disturbed",
        ),
        (checks.samples_check(records(), records(s4=None)), "step 4: 32 seen undisturbed, None disturbed"),
        (
            checks.weights_check("ab" * 32, "cd" * 32, exact=True),
            "sha256 abababababab undisturbed, cdcdcdcdcdcd disturbed",
        ),
        (checks.weights_check("ab" * 32, None, exact=True), "a run has not told them: it did not come to its end"),
        (checks.exit_check("after TERM", 143, 75), "after TERM: exit 143 (SIGTERM), expected 75"),
        (checks.leftovers_check(["process 7 (python)"], ["launch-abcd"]), "process 7 (python); /dev/shm/launch-abcd"),
    ],
)
def test_every_difference_is_a_finding_with_both_values(check: Check, evidence: str) -> None:
    assert (check.result, check.evidence) == (Result.FAIL, evidence)


def test_on_gpus_the_last_bits_may_differ() -> None:
    near = records(s3={"train/loss": 0.66667})
    assert checks.losses_check(records(), near, exact=False).result is Result.PASS
    assert checks.losses_check(records(), near, exact=True).result is Result.FAIL
    assert checks.weights_check("ab" * 32, "cd" * 32, exact=False).result is Result.UNKNOWN


def started(attempt: int, step: int, source: str | None) -> dict[str, Any]:
    return {"event": "training_started", "attempt": attempt, "step": step, "resumed_from": source}


@pytest.mark.parametrize(
    ("events", "result", "evidence"),
    [
        ([started(1, 0, None)], Result.FAIL, "it was not started again"),
        ([started(1, 0, None), started(2, 3, "step-3")], Result.PASS, "attempt 2 from step-3"),
        (
            [started(1, 0, None), started(2, 0, None)],
            Result.FAIL,
            "attempt 2 from the beginning, though step-3 had been saved",
        ),
        (
            [started(1, 0, None), {"event": "rescued", "step": 5}, started(2, 5, "step-5")],
            Result.PASS,
            "attempt 2 from step-5, kept by a rank that lived on",
        ),
    ],
)
def test_where_the_training_went_on(events: list[dict[str, Any]], result: Result, evidence: str) -> None:
    check = checks.resumed_check(events, 3)
    assert (check.result, check.evidence) == (result, evidence)


@pytest.mark.parametrize(
    ("clock", "told", "result"),
    [
        ([(1, 1, 5.0), (1, 2, 6.0), (1, 20, 8.0), (2, 3, 9.0)], None, Result.PASS),  # saved after step 2
        ([(1, 1, 5.0), (1, 2, 6.0), (1, 20, 8.0), (2, 2, 9.0)], None, Result.FAIL),
        ([(1, 1, 5.0), (2, 1, 9.0)], None, Result.FAIL),
        ([(1, 50, 7.5), (2, 100, 9.0)], None, Result.PASS),
        ([(1, 50, 7.5), (2, 50, 9.0)], None, Result.UNKNOWN),  # it was said after the checkpoint had been made
        ([(2, 100, 9.0)], None, Result.UNKNOWN),
        ([], None, Result.UNKNOWN),
        ([], "out/checkpoint-3", Result.PASS),
        ([(1, 1, 5.0), (2, 1, 9.0)], "out/checkpoint-3", Result.FAIL),
    ],
)
def test_of_a_script_its_step_clock_shows_it(
    clock: list[tuple[int, int, float]], told: str | None, result: Result
) -> None:
    event = {"event": "attempt_started", "attempt": 2, **({"resumes_from": told} if told else {})}
    said = [{"event": "progress", "attempt": one, "step": step, "time": time_s} for one, step, time_s in clock]
    assert checks.script_resumed_check([event, *said], "last.pt", 7.0).result is result


def test_what_was_not_checked_is_neither_a_pass_nor_a_finding() -> None:
    open_ = checks.unknown("losses", "of a script")
    assert not checks.is_pass([])
    assert not checks.is_pass([open_])
    assert checks.is_pass([open_, checks.passed("saves", "")])
    assert not checks.is_pass([open_, checks.passed("saves", ""), checks.failed("goes on", "")])
    line = checks.verdict_line([open_, checks.passed("saves", ""), checks.failed("goes on", "")], 2.0)
    assert line == "FAIL in 2.0s: 1 check passed, 1 failed, 1 not made"
    assert checks.fields([open_]) == [{"name": "losses", "result": "unknown", "evidence": "of a script"}]


def test_what_does_not_happen_in_time_is_said_and_the_folder_goes() -> None:
    with Stage(0.05) as stage:
        folder = stage.folder
        with pytest.raises(TooLateError, match="the moon rose: not within 0 s"):
            stage.until("the moon rose", lambda: None)
        with pytest.raises(TooLateError, match="it ended before the moon rose"):
            stage.until("the moon rose", lambda: None, lambda: True)
        assert folder.is_dir()
    assert not folder.exists()


def test_what_is_left_of_a_run_is_found() -> None:
    with Stage(5.0) as stage:
        (stage.runs / "tiny-1130-1412-zz9z" / "events").mkdir(parents=True)
        assert stage.leftovers() == ([], [])
        left = Path("/dev/shm/launch-zz9z-1-2-test")
        left.mkdir()
        sleeper = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"LAUNCH_RUN_ID": "tiny-1130-1412-zz9z"}
        )
        try:
            stage.until("it had begun", lambda: Path(f"/proc/{sleeper.pid}/environ").read_bytes())
            processes, shared = stage.leftovers(patience_s=0.0)
        finally:
            sleeper.kill()
            sleeper.wait()
            sleeper.stdin.close() if sleeper.stdin else None
            left.rmdir()
        assert (len(processes), shared) == (1, [left.name])
        assert str(sleeper.pid) in processes[0]


def test_a_run_that_is_interrupted_while_it_is_started_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    stage = Stage(5.0)
    with pytest.raises(KeyboardInterrupt), stage:
        stage.start("no-such-recipe.yaml", name="x")
    assert started[0].returncode == -signal.SIGKILL
    assert not stage.folder.exists()


def test_the_command_offers_what_can_be_played() -> None:
    assert [fault.value for fault in Fault] == list(FAULTS)
