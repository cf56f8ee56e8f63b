"""Reading run directories: growing files, the newest metrics, checkpoints by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import runs_values as values
from fake_executor import STARTS, Ends, Happens

from launcher.errors import RecipeError, Refused
from launcher.runs.checkpoints import checkpoint_steps, find_checkpoint
from launcher.runs.create import record_event
from launcher.runs.follow import Tail, size_bytes
from launcher.runs.load import newest_metrics, read_ended, read_plan, read_record, read_records
from launcher.runs.observed import GONE, Observation
from launcher.runs.rundir import RunDir
from launcher.runs.states import RunState


def test_a_tail_gives_whole_lines_only_and_the_rest_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.read() == b""
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.read() == b"one\n"
        file.write(b"o\n")
        assert tail.read() == b"two\n"
        file.write(b"three")
        assert tail.read() == b""
        assert tail.drain() == b"three\n"
    assert tail.drain() == b""
    tail.close()


def test_a_tail_may_begin_where_the_file_ends_now(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert size_bytes(path) == 0
    path.write_text("past\n")
    tail = Tail(path, begin_bytes=size_bytes(path))
    with path.open("a") as file:
        file.write("new\n")
    assert tail.drain() == b"new\n"
    tail.close()


def test_the_newest_metrics_are_the_whole_lines_at_the_end_of_the_newest_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_metrics(path) == []
    path.write_text("")
    assert newest_metrics(path) == []
    old = [{"attempt": 1, "step": step, "pad": "x" * 100} for step in range(2000)]
    new = [{"attempt": 2, "resumed_from": 100}, {"attempt": 2, "step": 101}, {"attempt": 2, "step": 102}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*old, *new]) + '{"step": 9')
    assert [line["step"] for line in newest_metrics(path)] == [101, 102]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert newest_metrics(path)[-1]["step"] == 1999
    assert len(newest_metrics(path)) < 1000


def test_a_record_of_a_live_run_has_the_step_of_its_metrics(runs_dir: Path) -> None:
    run = values.create(runs_dir)
    for moment in STARTS:
        moment.play(run)
    record_event(run, "submitted", ref="local:here:1:2")
    run.metrics.write_text('{"step": 17, "attempt": 1}\n')
    record = read_record(run, lambda ref: Observation(alive=ref == "local:here:1:2"))
    assert (record.state, record.step) == (RunState.RUNNING, 17)
    assert [worker["rank"] for worker in record.workers] == [0, 1]


def test_a_run_that_ends_while_it_is_asked_about_is_not_called_lost(runs_dir: Path) -> None:
    run = values.create(runs_dir)
    record_event(run, "submitted", ref="local:here:1:2")

    def ends_now(ref: str) -> Observation:
        Ends("SUCCEEDED", "done", 0).play(run)
        return GONE

    assert read_record(run, ends_now).state is RunState.SUCCEEDED


def test_all_jobs_are_asked_for_at_once_and_of_a_chain_the_next_may_carry_the_run(runs_dir: Path) -> None:
    chained, alone, done = (values.create(runs_dir, run_id=name) for name in ("chained", "alone", "done"))
    record_event(chained, "submitted", ref="slurm:1", chain=["slurm:1", "slurm:2"])
    record_event(alone, "submitted", ref="slurm:3")
    record_event(done, "submitted", ref="slurm:4")
    Ends("SUCCEEDED", "done", 0).play(done)
    asked: list[list[str]] = []

    def observe_all(refs: Sequence[str]) -> dict[str, Observation]:
        asked.append(list(refs))
        waits = Observation(alive=True, state="PENDING")
        return {ref: waits if ref == "slurm:2" else Observation(alive=False, state="TIMEOUT") for ref in refs}

    states = [record.state for record in read_records([chained, done, alone], observe_all)]
    assert states == [RunState.PENDING, RunState.SUCCEEDED, RunState.TIMED_OUT]
    assert asked == [["slurm:1", "slurm:2", "slurm:3"]]


def test_a_list_needs_the_result_alone_and_says_what_the_events_say(runs_dir: Path) -> None:
    run = values.create(runs_dir)
    for moment in STARTS:
        moment.play(run)
    Happens("worker", "training_started", {"attempt": 1, "step": 0, "total_steps": 632}).play(run)
    assert read_ended(run) is None
    Ends("SUCCEEDED", "done", 0, {"step": 632, "total_steps": 632}).play(run)
    short, whole = read_ended(run), read_record(run, lambda _: GONE)
    assert short is not None
    for name in ("state", "sentence", "step", "total_steps", "exit_code"):
        assert getattr(short, name) == getattr(whole, name), name
    run.result.rename(run.path / "result-1.json")  # as a resume does
    assert read_ended(run) is None


def test_a_job_that_never_began_left_its_words_or_none(runs_dir: Path) -> None:
    """F027."""
    run = values.create(runs_dir)
    record_event(run, "submitted", ref="slurm:7")
    ended = Observation(alive=False, state="FAILED")
    assert f"it left no output in {run.slurm}" in read_record(run, lambda _: ended).reason
    run.slurm.mkdir()
    (run.slurm / "7.log").write_text("launch | job 7 on n1\nlaunch | setup failed: no python\n")
    assert read_record(run, lambda _: ended).reason == "launch | job 7 on n1 | launch | setup failed: no python"


def test_a_plan_of_another_version_is_refused(runs_dir: Path) -> None:
    run = values.create(runs_dir)
    run.plan.write_text('{"version": 99}')
    with pytest.raises(Refused, match="plan version 99 is not 4") as refused:
        read_plan(run)
    assert f"launch {run.resolved}" in refused.value.problems[0].hint


@pytest.mark.parametrize("content", [b"", b'{"version": 4', b"[]", b"null", b"\xff", b'{"version": 4}'])
def test_a_damaged_plan_is_refused(runs_dir: Path, content: bytes) -> None:
    run = values.create(runs_dir)
    run.plan.write_bytes(content)
    with pytest.raises(Refused, match="damaged, or no plan of this launcher"):
        read_plan(run)


@pytest.fixture
def saved(runs_dir: Path) -> RunDir:
    run = values.create(runs_dir)
    for name in ("step-100", "step-9", "step-20.tmp", "note"):
        (run.checkpoints / name).mkdir(parents=True)
    return run


def test_checkpoints_are_found_by_step_latest_and_best(saved: RunDir) -> None:
    assert list(checkpoint_steps(saved)) == [9, 100]
    assert find_checkpoint(saved, "latest") == saved.checkpoints / "step-100"
    assert find_checkpoint(saved, "9") == saved.checkpoints / "step-9"
    for best in (9, 100):
        Happens("worker", "checkpoint_saved", {"step": best, "best": best == 9}).play(saved)
    assert find_checkpoint(saved, "best") == saved.checkpoints / "step-9"
    saved.result.write_text(json.dumps({"checkpoint": {"latest": 100, "best": 100}}))
    assert find_checkpoint(saved, "best") == saved.checkpoints / "step-100"


@pytest.mark.parametrize("which", ["20", "newest", "best", "-1"])
def test_a_checkpoint_that_is_not_there_exits_2_with_those_that_are(saved: RunDir, which: str) -> None:
    with pytest.raises(RecipeError, match="steps that are there: 9, 100"):
        find_checkpoint(saved, which)


def test_a_checkpoint_that_is_not_here_may_be_where_it_was_uploaded(saved: RunDir) -> None:
    for step in (9, 20):
        Happens("uploader", "uploaded", {"step": step, "url": "s3://b/r/checkpoints"}).play(saved)
    with pytest.raises(RecipeError, match="there: 9, 100; uploaded: s3://b/r/checkpoints/step-20"):
        find_checkpoint(saved, "20")
