"""`launch ... --on slurm` as far as the submission, against programs that answer as SLURM's do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_executor import FakeExecutor

from launcher.runs.create import record_event
from launcher.runs.events import read_events
from launcher.runs.find import all_runs

Launch = Callable[..., Any]

SBATCH = """
echo "$@" >>"$SITE/calls"
env >"$SITE/env-$(wc -l <"$SITE/calls")"
if [ -e "$SITE/refuse" ] || [ -e "$SITE/refuse-$(wc -l <"$SITE/calls")" ]; then
    echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2
    exit 1
fi
[ -e "$SITE/says" ] && cat "$SITE/says" >&2
echo "Submitted batch job $((100 + $(wc -l <"$SITE/calls")))"
"""
SCONTROL = """
case "$*" in
    "show config") printf 'SLURM_VERSION = 23.11.6\\nClusterName = lab\\nKillWait = 30 sec\\nPreemptType = (null)\\n' ;;
    *) echo "PartitionName=main Default=YES MaxTime=UNLIMITED MaxNodes=UNLIMITED State=UP TotalNodes=8" ;;
esac
"""
SQUEUE = """
for job in $(seq 101 $((100 + $(wc -l <"$SITE/calls")))); do
    echo "$job|PENDING|$(cat "$SITE/starts" 2>/dev/null || echo N/A)|N/A|UNLIMITED||Priority"
done
"""


@pytest.fixture
def site(place: type[FakeExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with SLURM's programs; each call of sbatch is a line in `calls`."""
    folder = tmp_path / "site"
    folder.mkdir()
    scripts = {"sbatch": SBATCH, "scontrol": SCONTROL, "squeue": SQUEUE, "scancel": 'echo "$@" >>"$SITE/cancelled"',
               "sinfo": "echo 'main|64|256000|gpu:h100:8'", "sacct": "exit 0"}  # fmt: skip
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "calls").touch()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SITE", str(folder))
    return folder


def calls(site: Path) -> list[str]:
    return (site / "calls").read_text().splitlines()


def test_a_job_is_submitted_and_what_follows_is_said(launch: Launch, site: Path) -> None:
    said = launch("train.py", "--on", "slurm", "--nodes", "2", "slurm.time=2h", "slurm.gpus_per_node=4")
    assert said.code == 0, said.err
    run = all_runs()[0].run
    assert said.out.splitlines()[0] == f"{run.run_id}   job 101"
    for part in (
        "where   partition main: 2 nodes with 4 CPUs and 4 GPUs each; 8 ranks on cuda",
        f"disk    ./runs/{run.run_id} (",
        "ends    after 2 h 00 min; then the run ends (there is no `resume:` to go on from)",
        "starts  SLURM does not say yet (waits: Priority)",
        "launch cancel last",
    ):
        assert part in said.out
    assert calls(site) == [str(run.slurm / "batch.sh")]
    plan = json.loads(run.plan.read_text())
    assert (run.slurm / "batch.sh").read_text() == plan["slurm"]["script"]
    assert (run.slurm / "batch-101.sh").read_text() == plan["slurm"]["script"]
    (submitted,) = [event for event in read_events(run.path) if event["event"] == "submitted"]
    assert submitted["ref"] == "slurm:101"
    assert "chain" not in submitted


def test_what_is_waited_for_is_called_as_the_user_called_it(launch: Launch, site: Path) -> None:
    assert launch("train.py", "--on", "slurm").code == 0
    assert "; not before last (job 101) has ended well" in launch("train.py", "--on", "slurm", "--after", "last").out
    assert "; not before job 7 has ended well" in launch("train.py", "--on", "slurm", "--after", "7").out


def test_a_resume_says_where_it_goes_on(launch: Launch, site: Path, tmp_path: Path) -> None:
    said = launch(chained(tmp_path), "--on", "slurm", "slurm.continue=requeue")
    assert said.code == 0, said.err
    assert "  from " not in said.out
    run = all_runs()[0].run
    record_event(run, "checkpoint_saved", step=40)
    record_event(run, "finished", state="CANCELLED", cause="cancelled", exit_code=75)
    said = launch("resume", "last")
    assert "  from    step-40, or the newest before it that is whole\n" in said.out, said.err


def test_a_job_that_waits_leaves_the_queue_and_nothing_is_to_be_seen_of_it(launch: Launch, site: Path) -> None:
    launch("train.py", "--on", "slurm")
    assert "nothing yet; -f waits for it" in launch("logs", "last").err
    (site / "squeue").write_text(
        '#!/bin/sh\n[ -e "$SITE/cancelled" ] && state=CANCELLED || state=PENDING\n'
        'echo "101|$state|N/A|N/A|UNLIMITED||Priority"\n'
    )
    said = launch("cancel", "last")
    assert "its job leaves the queue" in said.out
    assert "CANCELLED: stopped on request\n" in said.out
    assert "the run ended before it wrote anything: CANCELLED, stopped on request" in launch("logs", "last").err


def test_the_same_for_programs_with_when_it_starts(launch: Launch, site: Path) -> None:
    (site / "starts").write_text("1798070400")
    said = launch("train.py", "--on", "slurm", "--json")
    fields = json.loads(said.out)
    assert fields["ref"] == "slurm:101"
    assert (fields["job"], fields["state"], fields["reason"], fields["starts_s"]) == (
        "101", "PENDING", "Priority", 1798070400.0
    )  # fmt: skip
    assert "starts  expected 20" in launch("train.py", "--on", "slurm").out


def test_what_slurm_says_besides_is_passed_on(launch: Launch, site: Path, tmp_path: Path) -> None:
    (site / "says").write_text("sbatch: your job is charged to proj42\nsbatch: warning: the system is busy\n")
    said = launch(chained(tmp_path), "--on", "slurm").out
    assert said.count("  says    your job is charged to proj42\n") == 1
    assert "  says    warning: the system is busy\n" in said
    assert json.loads(launch("train.py", "--on", "slurm", "--json").out)["said"][0] == "your job is charged to proj42"


def test_a_refusal_leaves_nothing_and_names_the_keys(launch: Launch, site: Path) -> None:
    """F028"""
    (site / "refuse").touch()
    said = launch("train.py", "--on", "slurm", "slurm.qos=fast", "--after", "55")
    assert said.code == 3
    assert "sbatch: Batch job submission failed: Invalid qos" in said.err
    assert "--qos=fast (slurm.qos)" in said.err
    assert "--dependency=afterok:55 (slurm.after)" in said.err
    assert "by the launcher: --job-name=" in said.err
    assert "Traceback" not in said.err
    assert all_runs() == []
    assert list(Path("runs").iterdir()) == []


def chained(tmp_path: Path) -> str:
    recipe = tmp_path / "chain.yaml"
    recipe.write_text(
        f"name: chained\nscript: {Path('train.py').absolute()}\nresume: self\nslurm: {{continue: 'chain:3'}}\n"
    )
    return str(recipe)


def test_a_chain_is_several_jobs_each_after_the_one_before(launch: Launch, site: Path, tmp_path: Path) -> None:
    said = launch(chained(tmp_path), "--on", "slurm", "--begin", "now+1hour")
    assert said.code == 0, said.err
    assert "jobs 101, 102, 103, one by one" in said.out
    words = [call.split()[0] for call in calls(site)]
    assert words == ["--begin=now+1hour", "--dependency=afterany:101", "--dependency=afterany:102"]
    (submitted,) = [event for event in read_events(all_runs()[0].run.path) if event["event"] == "submitted"]
    assert submitted["chain"] == ["slurm:101", "slurm:102", "slurm:103"]


def test_of_a_chain_that_is_refused_half_way_nothing_is_left(launch: Launch, site: Path, tmp_path: Path) -> None:
    (site / "refuse-3").touch()
    assert launch(chained(tmp_path), "--on", "slurm").code == 3
    cancelled = (site / "cancelled").read_text()
    assert "101" in cancelled
    assert "102" in cancelled
    assert all_runs() == []


def test_the_job_inherits_the_user_and_not_the_job_that_he_is_in(
    launch: Launch, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4", "SLURM_CONF": "/etc/slurm.conf",
        "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "PMI_RANK": "3", "LAUNCH_HEAD": "n1:5",
        "LAUNCH_RUN_ID": "x", "SBATCH_ACCOUNT": "mine", "SBATCH_QOS": "slow", "SBATCH_EXPORT": "NONE",
        "SBATCH_REQUEUE": "1", "SRUN_DEBUG": "1", "MY_DATA": "/data", "OMP_NUM_THREADS": "2",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    said = launch("train.py", "--on", "slurm", "slurm.qos=fast")
    assert said.code == 0, said.err
    got = dict(line.split("=", 1) for line in (site / "env-1").read_text().splitlines() if "=" in line)
    assert got["MY_DATA"] == "/data"
    assert got["SLURM_CONF"] == "/etc/slurm.conf"
    assert got["SBATCH_ACCOUNT"] == "mine"
    gone = {"SLURM_JOB_ID", "SLURM_NTASKS", "RANK", "LOCAL_RANK", "MASTER_ADDR", "PMI_RANK", "LAUNCH_HEAD",
            "LAUNCH_RUN_ID", "SBATCH_QOS", "SBATCH_EXPORT", "SBATCH_REQUEUE", "SRUN_DEBUG"}  # fmt: skip
    assert not gone & got.keys()


def test_a_dry_run_shows_what_would_be_refused_and_asks_for_nothing(launch: Launch, site: Path) -> None:
    said = launch("train.py", "--on", "slurm", "--nodes", "64", "slurm.partition=main", "--dry-run")
    assert said.code == 0
    assert "would be refused: --nodes: resources.nodes: 64 nodes asked for, but the partition main" in said.err
    assert "#SBATCH --nodes=64" in said.out
    assert calls(site) == []
    assert launch("train.py", "--on", "slurm", "--nodes", "64", "slurm.partition=main").code == 3
    assert calls(site) == []
    assert all_runs() == []


def test_without_slurm_a_dry_run_is_whole_and_a_launch_refused(
    launch: Launch, place: type[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    said = launch("train.py", "--on", "slurm", "--nodes", "2", "--dry-run")
    assert said.code == 0
    assert "there is no SLURM on this machine" in said.out
    said = launch("train.py", "--on", "slurm")
    assert said.code == 3
    assert "there is no sbatch on this machine" in said.err
    assert all_runs() == []


def test_what_only_a_queue_can_do_is_not_dropped_elsewhere(launch: Launch, place: type[FakeExecutor]) -> None:
    said = launch("train.py", "--begin", "now+1hour", "--after", "5", "--on", "local")
    assert said.code == 2
    assert "--after: local has no queue" in said.err
    assert "--begin: local has no queue" in said.err
    assert place.plans == []


def test_prepare_goes_before_the_submission(launch: Launch, site: Path) -> None:
    """F097"""
    lines = ["test ! -s $SITE/calls", 'echo "for $LAUNCH_RUN_DIR"']
    said = launch("train.py", "--on", "slurm", f"prepare={json.dumps(lines)}", "internet=false")
    assert said.code == 0, said.err
    run = all_runs()[0].run
    assert f"prepare | for {run.path}\n" in said.err
    assert (run.path / "logs" / "prepare.log").read_text() == f"for {run.path}\n"
    assert "prepared" in [event["event"] for event in read_events(run.path)]


def test_where_prepare_fails_nothing_is_queued_and_nothing_left(launch: Launch, site: Path) -> None:
    """F097"""
    said = launch("train.py", "--on", "slurm", 'prepare=["echo one", "ls /nonexistent"]')
    assert said.code == 3
    assert "prepare: line 2 (`ls /nonexistent`) ended with exit code 2: ls: cannot access '/nonexistent'" in said.err
    assert calls(site) == []
    assert all_runs() == []


def test_after_a_run_waits_for_its_newest_job(launch: Launch, site: Path) -> None:
    assert launch("train.py", "--on", "slurm", "--name", "first").code == 0
    (site / "starts").write_text("1798070400")
    first = all_runs()[0].run_id
    assert launch("train.py", "--on", "slurm", "--after", first).code == 0
    assert calls(site)[1].startswith("--dependency=afterok:101 --kill-on-invalid-dep=yes ")
    assert launch("train.py", "--on", "slurm", "--after", "nosuchrun").code == 2


def test_each_job_keeps_the_script_that_it_was_submitted_with(launch: Launch, site: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "again.yaml"
    recipe.write_text(f"name: again\nscript: {Path('train.py').absolute()}\nresume: self\n")
    assert launch(str(recipe), "--on", "slurm").code == 0
    run = all_runs()[0].run
    (site / "squeue").write_text("#!/bin/sh\n")  # it is gone
    events = run.events / "head.jsonl"
    events.write_text('{"time": 9e9, "writer": "head", "event": "finished", "state": "FAILED", "exit_code": 1}\n')
    assert launch("resume", "last", "slurm.time=3h").code == 0
    assert "--time=03:00:00" not in (run.slurm / "batch-101.sh").read_text()
    assert "--time=03:00:00" in (run.slurm / "batch-102.sh").read_text()
    assert "--time=03:00:00" in (run.slurm / "batch.sh").read_text()


def test_a_rerun_does_not_wait_again(launch: Launch, site: Path) -> None:
    assert launch("train.py", "--on", "slurm", "--begin", "now+1hour").code == 0
    assert launch("rerun", "last").code == 0
    assert calls(site)[0].startswith("--begin=now+1hour ")
    assert "--begin" not in calls(site)[1]


def test_a_resume_that_slurm_refuses_ends_the_run_again(launch: Launch, site: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "goes-on.yaml"
    recipe.write_text(f"name: goes-on\nscript: {Path('train.py').absolute()}\nresume: self\n")
    assert launch(str(recipe), "--on", "local").code == 0
    (site / "refuse").touch()
    said = launch("resume", "last", "--on", "slurm", "env.A=1")
    assert said.code == 3
    status = launch("status", "last", "--json").json
    assert (status["state"], status["cause"]) == ("FAILED", "refused")
    (site / "refuse").unlink()
    assert launch("resume", "last", "--on", "slurm").code == 0


def test_a_template_of_the_site_is_what_is_submitted(launch: Launch, site: Path, tmp_path: Path) -> None:
    (tmp_path / "site.j2").write_text(
        "#!/bin/bash -l\n{% for flag in flags %}\n#SBATCH {{ flag }}\n{% endfor %}\nmodule purge\n"
        "run_dir={{ run_dir }}\nexec {{ command }}\n"
    )
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"name: own\nscript: {Path('train.py').absolute()}\nslurm: {{template: site.j2}}\n")
    assert launch(str(recipe), "--on", "slurm").code == 0
    assert "\nmodule purge\n" in (all_runs()[0].run.slurm / "batch.sh").read_text()
    (tmp_path / "site.j2").unlink()
    said = launch(str(recipe), "--on", "slurm")
    assert said.code in (2, 3)
    assert "site.j2" in said.err
