"""Submission: what reaches SLURM, what the workers get of it, and what is said where SLURM does not take it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import LAUNCH
from slurm_cluster import COMMAND, SlurmCluster
from slurm_launched import Login, OnSlurm, SlurmLaunched, quickest_s

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm")]

LIMIT_OF_DRY_RUN_S = 0.8
REPORT = """
import json, os, sys
out = os.path.join(os.environ["LAUNCH_RUN_DIR"], f"rank-{os.environ['RANK']}.json")
with open(out + ".tmp", "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "cpus": len(os.sched_getaffinity(0))}, file)
os.rename(out + ".tmp", out)  # whoever waits for it finds all of it
"""
ODD = ["a b", "it's", '72" tall', '--x={"a":[1]}', "$HOME", "*", "", "two\nlines", "grün", "-v", "k=v", "%j"]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A script of which each rank writes down what it got."""
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    return script


def plan_of(run: SlurmLaunched) -> dict[str, Any]:
    plan: dict[str, Any] = run.until(lambda: run.refs and json.loads(run.run.plan.read_text()))
    return plan


def reports(run: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem.removeprefix("rank-")): json.loads(path.read_text()) for path in run.glob("rank-*.json")}


def test_workers_get_ranks_arguments_cpus_and_no_other_job(
    on_slurm: OnSlurm, report: Path, slurm_cluster: SlurmCluster
) -> None:
    """F014 F029 F056: one set of ranks over two nodes, arguments as they were, the CPUs asked for."""
    inside = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "7", "SLURM_PROCID": "3", "RANK": "5", "WORLD_SIZE": "9"}
    run = on_slurm(report, "--nodes", "2", "--nproc-per-node", "2", "--", *ODD, env={**inside, "MINE": "a b"})
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    ranks = reports(run.run.path)
    assert sorted(ranks) == [0, 1, 2, 3]
    assert all(rank["argv"] == ODD for rank in ranks.values())
    local = {number: rank["env"]["LOCAL_RANK"] for number, rank in ranks.items()}
    assert local == {0: "0", 1: "1", 2: "0", 3: "1"}
    for number, rank in ranks.items():
        assert (rank["env"]["WORLD_SIZE"], rank["env"]["RANK"]) == ("4", str(number))
        assert rank["env"]["SLURM_JOB_ID"] == run.job
        assert rank["env"]["MINE"] == "a b"
        assert rank["cpus"] == 2
    script = (run.run.slurm / "batch.sh").read_text()
    assert plan_of(run)["slurm"]["script"] == script
    assert "--partition" not in script
    assert "--mem" not in script


def test_nothing_is_said_to_slurm_that_a_user_did_not_say(on_slurm: OnSlurm, report: Path) -> None:
    """F028: no flag of a site is made up."""
    run = on_slurm(report)
    said = [line.split()[1].split("=")[0] for line in plan_of(run)["slurm"]["script"].splitlines() if "#SBATCH" in line]
    assert set(said) == {
        "--job-name", "--nodes", "--ntasks-per-node", "--cpus-per-task", "--output", "--open-mode", "--no-requeue"
    }  # fmt: skip


@pytest.mark.parametrize("asked", [["slurm.gpus_per_node=2"], ["slurm.gres=gpu:2"]])
def test_workers_of_a_node_see_all_its_gpus(on_slurm: OnSlurm, report: Path, asked: list[str]) -> None:
    """F041: per node, by either flag, and no task sees another GPU as 0."""
    run = on_slurm(report, *asked, "resources.device=cpu", "--nproc-per-node", "2")
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    seen = {rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in reports(run.run.path).values()}
    assert len(seen) == 1
    assert len(seen.pop().split(",")) == 2


def test_a_folder_with_spaces_and_percents_and_a_flag_with_quotes(
    on_slurm: OnSlurm, report: Path, tmp_path: Path, slurm_cluster: SlurmCluster
) -> None:
    """F056: each text passes the one shell and SLURM's own reading of `#SBATCH` unchanged."""
    folder = tmp_path / "my 100%j runs #1"
    comment = 'exp 7 # it\'s "a"'
    run = on_slurm(report, f"slurm.sbatch={json.dumps({'comment': comment})}", "--runs-dir", str(folder))
    job = run.job
    assert f"Comment={comment}" in slurm_cluster.run("scontrol", "show", "job", job)
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    assert (run.run.slurm / f"{job}.log").is_file()


def test_slurm_refuses_in_its_own_words_and_nothing_is_left(
    login: Login, report: Path, tmp_path: Path, slurm_cluster: SlurmCluster
) -> None:
    """F028: the sentence, the flags that were sent, the keys that set them; exit 3; no run, no job, no traceback."""
    runs = tmp_path / "refused"
    said = login(
        str(report), "slurm.sbatch={licenses: nope}", "--on", "slurm", "--runs-dir", str(runs), "--name", "refused"
    )
    assert said.returncode == 3
    assert "Invalid license specification" in said.stderr
    assert "--licenses=nope (slurm.sbatch.licenses)" in said.stderr
    assert "Traceback" not in said.stderr
    assert list(runs.iterdir()) == []
    assert "refused-" not in login("ls", "--all").stdout
    assert "refused-" not in slurm_cluster.run("squeue", "-h", "-o", "%j")


def test_what_the_partition_never_starts_is_refused_before_the_queue(
    login: Login, report: Path, tmp_path: Path
) -> None:
    """F027 F028: all of it at once, at the keys that say it."""
    wrong = ["slurm.partition=lo", "--nodes", "400", "--runs-dir", str(tmp_path / "none")]
    said = login(str(report), *wrong, "--on", "slurm")
    assert said.returncode == 3
    assert "there is no partition 'lo'" in said.stderr
    assert "did you mean low?" in said.stderr
    wrong[0] = "slurm.partition=low"
    said = login(str(report), *wrong, "slurm.gpus_per_node=9", "resources.device=cpu", "--on", "slurm")
    assert said.returncode == 3
    assert "400 nodes asked for, but the partition low gives a job at most" in said.stderr
    assert "slurm.gpus_per_node: 9 asked for" in said.stderr
    assert not (tmp_path / "none").exists()


def test_a_flag_that_contradicts_the_recipe_is_a_mistake_in_it(login: Login, report: Path, tmp_path: Path) -> None:
    """F029: one task per node, or there are several launchers on it."""
    runs = ("--runs-dir", str(tmp_path / "none"))
    said = login(str(report), "slurm.sbatch={ntasks: 1}", "--nodes", "2", "--on", "slurm", *runs)
    assert said.returncode == 2
    assert "slurm.sbatch.ntasks" in said.stderr
    assert "use resources.nodes and resources.nproc_per_node" in said.stderr
    assert not (tmp_path / "none").exists()


def test_where_the_run_directory_cannot_be_made_nothing_is_queued(
    login: Login, report: Path, slurm_cluster: SlurmCluster
) -> None:
    """F027: SLURM opens its log before anything of ours runs, and makes no folder."""
    said = login(str(report), "--on", "slurm", "--runs-dir", "/proc/runs", "--name", "nowhere")
    assert said.returncode == 3
    assert "/proc" in said.stderr
    assert "nowhere-" not in slurm_cluster.run("squeue", "-h", "-o", "%j")


def test_a_chain_is_queued_at_once_and_its_rest_ends_with_the_run(
    on_slurm: OnSlurm, report: Path, slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    recipe = tmp_path / "chain.yaml"
    recipe.write_text(f"name: chain\nscript: {report}\nresume: self\nslurm: {{continue: 'chain:3', begin: now+2}}\n")
    run = on_slurm(recipe)
    (submitted,) = run.until(lambda: [event for event in run.events if event["event"] == "submitted"])
    jobs = [ref.partition(":")[2] for ref in submitted["chain"]]
    assert len(jobs) == 3
    assert submitted["ref"] == submitted["chain"][0]
    assert f"afterany:{jobs[1]}" in slurm_cluster.run("squeue", "-h", "-j", jobs[2], "-o", "%E")
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    slurm_cluster.wait_until(
        lambda: not slurm_cluster.run("squeue", "-h", "-j", ",".join(jobs), "-o", "%i"), lambda: "the chain is left"
    )
    assert len(list(run.run.path.glob("rank-0.json"))) == 1


def test_prepare_runs_once_where_launch_is_called_and_its_failure_queues_nothing(
    on_slurm: OnSlurm, login: Login, report: Path, tmp_path: Path, slurm_cluster: SlurmCluster
) -> None:
    """F097: not on the nodes, and not once per node."""
    counter = tmp_path / "counter"
    lines = [f"echo $(hostname) >>{shlex.quote(str(counter))}", 'test -d "$LAUNCH_RUN_DIR"', "echo fetched"]
    run = on_slurm(report, f"prepare={json.dumps(lines)}", "--nodes", "2")
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    assert counter.read_text().splitlines() == [os.uname().nodename]
    assert (run.run.path / "logs" / "prepare.log").read_text() == "fetched\n"
    assert not any("$" in word for word in plan_of(run)["slurm"]["srun"])
    failing = json.dumps(["echo going", "cat /nonexistent/weights", "echo never"])
    said = login(
        str(report), f"prepare={failing}", "--on", "slurm", "--runs-dir", str(tmp_path / "no"), "--name", "unready"
    )
    assert said.returncode == 3
    assert "line 2 (`cat /nonexistent/weights`) ended with exit code 1" in said.stderr
    assert "never" not in said.stderr.replace("echo never", "")
    assert list((tmp_path / "no").iterdir()) == []
    assert "unready-" not in slurm_cluster.run("squeue", "-h", "-o", "%j")


def command_lines() -> list[bytes]:
    """Of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found


def test_a_secret_is_in_no_file_no_script_and_no_word_of_slurm(
    on_slurm: OnSlurm, report: Path, slurm_cluster: SlurmCluster
) -> None:
    canary = "canary-3f9a1c77d2"
    waits = (
        "\nimport time\nwhile not os.path.exists(os.path.join(os.environ['LAUNCH_RUN_DIR'], 'go')): time.sleep(0.01)\n"
    )
    report.write_text(
        REPORT.replace("json.dump(", 'os.environ["WANDB_API_KEY"]; os.environ.pop("WANDB_API_KEY"); json.dump(') + waits
    )
    run = on_slurm(report, "secrets=[WANDB_API_KEY]", env={"WANDB_API_KEY": canary})
    said = slurm_cluster.run("scontrol", "show", "job", run.job)
    written = slurm_cluster.command("run", "scontrol", "write", "batch_script", run.job, "-").stdout
    run.until(lambda: reports(run.run.path))
    lines = command_lines()
    assert any(run.run_id.encode() in line for line in lines), "the agents are seen"
    run.let("go")
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    assert canary not in said + written
    assert not any(canary.encode() in line for line in lines)
    found = [path for path in run.run.path.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert found == []


def test_after_waits_for_a_run_and_begin_for_a_moment(
    on_slurm: OnSlurm, report: Path, slurm_cluster: SlurmCluster
) -> None:
    first = on_slurm(report, "--begin", "now+1hour")
    assert first.state == "PENDING"
    second = on_slurm(report, "--after", first.run.run_id)
    assert slurm_cluster.run("squeue", "-h", "-j", second.job, "-o", "%E").startswith(f"afterok:{first.job}")


def test_a_run_changes_its_place(on_slurm: OnSlurm, login: Login, report: Path, tmp_path: Path) -> None:
    """`resume --on local` of a job, `rerun --on slurm` of a local run."""
    recipe = tmp_path / "moves.yaml"
    recipe.write_text(f"name: moves\nscript: {report}\nresume: self\n")
    run = on_slurm(recipe)
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    moved = login("resume", run.run.run_id, "env.MORE=1", "--on", "local")
    assert moved.returncode == 0, moved.stderr
    assert plan_of(run)["executor"] == "local"
    assert plan_of(run)["slurm"] is None
    assert "MORE" in reports(run.run.path)[0]["env"]
    back = login("rerun", run.run.run_id, "--on", "slurm", "--json", "--begin", "now+1hour")
    assert back.returncode != 0  # `rerun` has no such option
    back = login("rerun", run.run.run_id, "--on", "slurm", "--json")
    assert back.returncode == 0, back.stderr
    assert json.loads(back.stdout.splitlines()[-1])["ref"].startswith("slurm:")


@pytest.mark.parametrize("with_slurm", [True, False])
def test_the_plan_of_a_thousand_nodes_is_shown_at_once(
    slurm_cluster: SlurmCluster, report: Path, *, with_slurm: bool
) -> None:
    """Without SLURM there is nothing of it to be found."""
    options = ["--nodes", "1024", "--nproc-per-node", "8", "--on", "slurm", "--dry-run"]
    launch = [LAUNCH, str(report), *options]
    argv = [str(COMMAND), "run", *launch] if with_slurm else launch
    env = dict(os.environ) if with_slurm else {**os.environ, "PATH": "/nonexistent"}

    def show() -> None:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "8,192 = 1,024 nodes x 8 per node" in done.stdout

    assert quickest_s(show, limit_s=LIMIT_OF_DRY_RUN_S) < LIMIT_OF_DRY_RUN_S


FAKE_APPTAINER = """#!/bin/bash
# As far as a job can tell: the options are read, what follows the image is run.
echo "$@" >>"$LAUNCH_RUN_DIR_OF_TEST/apptainer.txt"
while [ "$1" != oras://images/ft.sif ]; do shift; done
shift
exec "$@"
"""


def test_the_agent_travels_to_an_interpreter_that_has_nothing_of_ours(
    on_slurm: OnSlurm, report: Path, tmp_path: Path
) -> None:
    """Inside an image, which is played by a program of its name, nothing of our installation is used."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "apptainer"
    fake.write_text(FAKE_APPTAINER)
    fake.chmod(0o755)
    container = {
        "runtime": "apptainer",
        "image": "oras://images/ft.sif",
        "mounts": [str(tmp_path)],
        "args": ["--cleanenv"],
    }
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "LAUNCH_RUN_DIR_OF_TEST": str(tmp_path)}
    run = on_slurm(
        report, f"slurm.container={json.dumps(container)}", f"python={sys.executable}", "--nodes", "2", env=env
    )
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    assert sorted(reports(run.run.path)) == [0, 1]
    said = (tmp_path / "apptainer.txt").read_text().splitlines()
    assert len(said) == 2
    assert said[0].startswith(
        f"exec --bind {tmp_path} --pwd {tmp_path} --cleanenv oras://images/ft.sif {sys.executable}"
    )
    assert f"-P {run.run.path}/agent/start.py" in said[0]
