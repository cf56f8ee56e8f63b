"""The job of a plan, where the golden cases do not say it: what is chosen, and what a partition would refuse."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pytest
from planning_values import facts, job, loaded, script

from launcher.errors import RecipeError
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan
from launcher.planning.sbatch_flags import sbatch_findings
from launcher.planning.slurm import ends_text
from launcher.planning.slurm_facts import Partition, SlurmFacts
from launcher.planning.slurm_site import site_problems
from launcher.recipe.sbatch_options import ALLOWED, PROTECTED, sbatch_hint
from launcher.recipe.schema import Recipe

MAIN = Partition(
    name="main",
    default=True,
    max_time_s=3600.0,
    nodes=8,
    max_nodes=4,
    min_nodes=2,
    preempt_mode="REQUEUE",
    grace_s=20.0,
    cpus_per_node=32,
    gpus_per_node=4,
    gres=("gpu:a100:4",),
)
DOWN = Partition(name="old", state="DOWN", nodes=1)
SITE = SlurmFacts(
    version="23.11.6", cluster="lab", job_requeue=True, kill_wait_s=30.0, preempt_type="preempt/partition_prio",
    partitions=(MAIN, DOWN),
)  # fmt: skip


def plan(
    recipe: Recipe, *, site: SlurmFacts | None = SITE, origins: Mapping[str, str] | None = None, **more: Any
) -> Plan:
    here = facts(slurm=site, **more)
    return make_plan(loaded(recipe, origins=origins), here, run_id="r0", runs_dir="runs", executor="slurm")


def slurm(**section: Any) -> Recipe:
    return job(slurm=section, batch=1024)


def messages(recipe: Recipe, site: SlurmFacts = SITE) -> list[str]:
    return [problem.message for problem in site_problems(plan(recipe, site=site), site)]


def test_what_the_login_node_has_is_not_what_a_node_gives() -> None:
    made = plan(slurm(), gpus=8, cpus=64)
    assert (made.device, made.nproc_per_node, made.threads) == ("cpu", 1, 1)
    made = plan(slurm(gpus_per_node=2, cpus_per_gpu=6), gpus=0, cpus=1)
    assert (made.device, made.nproc_per_node, made.threads) == ("cuda", 2, 6)
    assert made.slurm is not None
    assert (made.slurm.cpus_per_node, made.slurm.gpus_per_node) == (12, 2)
    assert {(node.host, node.address, node.cpus) for node in made.nodes} == {("", "", ())}
    assert made.nodes[0].gpus == (0, 1)


def test_cpus_hold_workers_threads_and_loaders() -> None:
    """F014 F075"""
    recipe = job(batch=1024, resources={"nproc_per_node": 2, "threads": 3})
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"loader_workers": 2})})  # type: ignore[union-attr]
    made = plan(recipe)
    assert made.slurm is not None
    assert made.slurm.cpus_per_node == 10
    assert "--cpus-per-task=10" in made.slurm.srun
    assert made.threads == 3


@pytest.mark.parametrize(
    ("mode", "kind", "how"),
    [
        ("REQUEUE", "preempt/partition_prio", "requeue"),
        ("CANCEL", "preempt/qos", "resubmit"),
        ("CANCEL", "preempt/none", "requeue"),
    ],
)
def test_a_run_goes_on_as_the_site_allows(mode: str, kind: str, how: str) -> None:
    """F043 F049"""
    site = SlurmFacts(preempt_type=kind, partitions=(Partition(name="a", default=True, preempt_mode=mode),))
    made = plan(slurm(), site=site)
    assert made.slurm is not None
    assert made.slurm.continue_how == how
    assert made.slurm.continue_reason
    assert ("--requeue" if how == "requeue" else "--no-requeue") in made.slurm.script


def test_what_cannot_resume_is_never_requeued() -> None:
    """F043"""
    made = plan(script())
    assert made.slurm is not None
    assert made.slurm.continue_how == "none"
    assert "--no-requeue" in made.slurm.script
    assert any("there is no `resume:`" in note for note in made.notes)


@pytest.mark.parametrize(("kill_wait_s", "grace_s"), [(10.0, 5.0), (None, 25.0), (120.0, 115.0), (3.0, 5.0)])
def test_a_stop_is_over_before_slurm_kills(kill_wait_s: float | None, grace_s: float) -> None:
    """F016"""
    made = plan(slurm(), site=SlurmFacts(kill_wait_s=kill_wait_s))
    assert made.limits.grace_s == grace_s


def test_a_grace_that_slurm_does_not_wait_for_is_said_with_both_values() -> None:
    """F016"""
    made = plan(job(batch=1024, faults={"grace": "10m"}))
    assert any("600 s" in note and "30 s" in note and "KillWait" in note for note in made.notes)
    assert any("GraceTime" in note and "20 s" in note for note in made.notes)


def test_each_flag_has_the_key_that_set_it_and_no_other_is_made_up() -> None:
    """F028 F040"""
    made = plan(slurm())
    assert made.slurm is not None
    assert {flag.key for flag in made.slurm.flags} <= {"plan", "resources.nodes"}
    made = plan(slurm(partition="main", mem="1G", sbatch={"nice": 5, "comment": None}))
    assert made.slurm is not None
    keys = {flag.flag: flag.key for flag in made.slurm.flags}
    assert keys["--mem"] == "slurm.mem"
    assert keys["--nice"] == "slurm.sbatch.nice"
    assert "--comment" not in keys


def test_one_variable_of_the_limits_is_in_local_time() -> None:
    made = plan(job(batch=1024, limits={"wall": "2h", "gpu_hours": 3, "until": "2026-12-24"}), until_s=1798070400.0)
    assert (made.limits.wall_s, made.limits.gpu_hours, made.limits.until_s) == (7200.0, 3.0, 1798070400.0)


def test_the_line_by_hand_is_one_for_any_number_of_nodes() -> None:
    made = plan(job(batch=8192, resources={"nodes": 1024}))
    (line,) = made.torchrun
    words = shlex.split(line)
    assert words[words.index("srun") + 1] == "--nodes=1024"
    assert "--node-rank $SLURM_NODEID" in words[-1]


def test_no_shell_variable_is_left_in_what_srun_gets() -> None:
    """F097"""
    made = plan(script(env={"A": "$HOME"}, scratch="/scratch/$SLURM_JOB_ID"))
    assert made.slurm is not None
    assert not any("$" in word for word in made.slurm.srun)
    container = {"runtime": "pyxis", "image": "$IMAGE", "mounts": ["/data/${USER}"]}
    with pytest.raises(RecipeError) as caught:
        plan(script(slurm={"container": container}))
    assert [problem.message.split(":")[0] for problem in caught.value.problems] == [
        "slurm.container.image", "slurm.container.mounts.0"
    ]  # fmt: skip


def test_a_flag_is_allowed_or_protected_with_what_to_do_instead() -> None:
    assert not ALLOWED & PROTECTED.keys()
    assert list(sbatch_findings(ALLOWED)) == []
    assert all(finding.hint for finding in sbatch_findings(PROTECTED))
    (finding,) = sbatch_findings(["exclud"])
    assert finding.hint == "did you mean 'exclude'?"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--time", "use slurm.time"),
        ("-p", "use slurm.partition"),
        ("ntasks_per_node", "use resources.nproc_per_node"),
        ("mail_type", "use slurm.sbatch.mail-type"),
        ("nodelist", "use slurm.sbatch.nodelist"),
    ],
)
def test_an_option_of_sbatch_is_told_as_the_key_that_says_it(option: str, said: str) -> None:
    assert said in sbatch_hint(option)


@pytest.mark.parametrize("word", ["--usage", "-n", "-time", "tme", "", "-"])
def test_what_is_none_of_them_is_not_taken_for_one(word: str) -> None:
    assert sbatch_hint(word) == ""


def test_slurm_counts_in_minutes() -> None:
    made = plan(slurm(time="90s")).slurm
    assert made is not None
    assert ends_text(made).startswith("after 2 min 00 s; then ")


def test_a_fitting_job_has_no_problem() -> None:
    assert messages(job(batch=1024, resources={"nodes": 2}, slurm={"time": "1h", "gpus_per_node": 4})) == []


def test_all_limits_of_a_partition_are_seen_at_once() -> None:
    wrong = {"time": "2h", "gpus_per_node": 8, "cpus_per_node": 64}
    said = messages(job(batch=1280, resources={"nodes": 5, "device": "cpu"}, slurm=wrong))
    assert len(said) == 4
    assert "5 nodes asked for, but the partition main gives a job at most 4" in said[0]
    assert "02:00:00 asked for, but the partition main gives at most 01:00:00" in said[1]
    assert "64 CPUs per node asked for (slurm.cpus_per_node)" in said[2]
    assert "at most 4 (gpu:a100:4)" in said[3]
    (few,) = messages(slurm())
    assert "1 node asked for, but the partition main gives a job at least 2" in few


def test_a_partition_that_there_is_not_or_that_is_down() -> None:
    (unknown,) = site_problems(plan(slurm(partition="man")), SITE)
    assert "there is no partition 'man' in lab" in unknown.message
    assert unknown.hint == "did you mean main? There are main (default), old"
    assert messages(slurm(partition="old")) == ["slurm.partition: old is DOWN"]
    assert "no default partition" in messages(slurm(), SlurmFacts(partitions=(DOWN,)))[0]


def test_of_several_partitions_one_that_can_is_enough() -> None:
    two = job(batch=1024, resources={"nodes": 2}, slurm={"partition": "old,main"})
    assert messages(two) == []
    assert messages(slurm(partition="old,main")) == ["slurm.partition: old is DOWN"]


@pytest.mark.parametrize(("name", "said"), [("a\\b", "a backslash"), ("a\nb", "a line end")])
def test_a_folder_that_slurm_cannot_write_a_log_to(name: str, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        make_plan(loaded(slurm()), facts(slurm=SITE), run_id="r0", runs_dir=f"/{name}", executor="slurm")
    (problem,) = error.value.problems
    assert f"below a folder with {said} in its name" in problem.message


def test_a_mistake_is_shown_where_it_was_made() -> None:
    recipe = slurm(partition="nope")
    made = plan(recipe, origins={"slurm.partition": "recipe.yaml:3:5"})
    assert [problem.where for problem in site_problems(made, SITE)] == ["recipe.yaml:3:5"]


def test_a_controller_that_is_away_is_a_problem_and_in_a_plan_a_note() -> None:
    away = SlurmFacts(fault="`scontrol show config`: no answer")
    assert "no answer" in messages(slurm(), away)[0]
    assert any("were not checked" in note for note in plan(slurm(), site=away).notes)
    assert any("there is no SLURM on this machine" in note for note in plan(slurm(), site=None).notes)


def test_what_ends_a_job_is_one_sentence() -> None:
    made = plan(slurm(time="2h", **{"continue": "chain:3"}))
    assert made.slurm is not None
    assert (
        ends_text(made.slurm) == "after 2 h 00 min; then the next of 3 jobs goes on from the last checkpoint (as asked)"
    )


def test_offline_nodes_have_their_variables_unless_the_user_says_else() -> None:
    def given(recipe: Recipe, **environment: str) -> dict[str, str]:
        return {variable.name: variable.value for variable in plan(recipe, environment=environment).env}

    names = {"WANDB_MODE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"}
    assert names <= given(job(batch=1024, internet=False)).keys()
    assert not names & given(job(batch=1024)).keys()
    assert "WANDB_MODE" not in given(job(batch=1024, internet=False), WANDB_MODE="online")
    disabled = job(batch=1024, internet=False, tracking={"wandb": {"mode": "disabled"}})
    assert "WANDB_MODE" not in given(disabled)
    assert given(job(batch=1024, internet=False, env={"HF_HUB_OFFLINE": "0"}))["HF_HUB_OFFLINE"] == "0"
