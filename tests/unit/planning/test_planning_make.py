"""The plan as a whole: pure, complete, and the same for the same input."""

from __future__ import annotations

import os
import shlex
import subprocess
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planning_values import env, facts, job, loaded, origins, plan, script

from launcher.errors import RecipeError
from launcher.planning.make import make_plan
from launcher.planning.plan import PLAN_VERSION, Plan
from launcher.planning.render import render_plan

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 24), st.integers(0, 16))


def sized(nodes: int, nproc: int, cpus: int, gpus: int) -> Plan:
    """A plan on the GPUs there are, or on CPU with `nproc` workers a node."""
    device = {"device": "cuda"} if gpus >= nodes else {"device": "cpu", "nproc_per_node": nproc}
    return plan(script(resources={"nodes": nodes, **device}), facts(cpus=cpus, gpus=gpus))


@given(SIZES)
def test_nodes_are_disjoint_and_leave_nothing_that_could_be_dealt_out(sizes: tuple[int, int, int, int]) -> None:
    nodes, _, cpus, gpus = sizes
    made = sized(*sizes)
    assert [node.index for node in made.nodes] == list(range(nodes))
    assert made.world_size == sum(made.nproc_per_node for _ in made.nodes)
    dealt = [gpu for node in made.nodes for gpu in node.gpus]
    assert dealt == list(range(len(dealt))), "in order, each once"
    if made.device == "cuda":
        assert gpus - len(dealt) < nodes
        assert all(len(node.gpus) == made.nproc_per_node for node in made.nodes)
    cores = [cpu for node in made.nodes for cpu in node.cpus]
    assert cores == (list(range(cpus)) if cpus >= nodes else [])


@given(SIZES)
def test_a_plan_reads_back_to_an_equal_one(sizes: tuple[int, int, int, int]) -> None:
    made = sized(*sizes)
    assert Plan.from_json(made.to_json()) == made


class Poison(dict[str, str]):
    """An environment that nobody may look at."""

    def __getitem__(self, name: str) -> str:
        raise AssertionError(f"{name} was read from the environment")

    get = __contains__ = __iter__ = keys = items = copy = __getitem__  # type: ignore[assignment]


def test_planning_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, here = job(resources={"nodes": 2}, network={"nccl": {"SOKET": 1}}), facts(gpus=2)
    before = plan(recipe, here)
    with monkeypatch.context() as poisoned:
        poisoned.setattr(os, "environ", Poison())
        poisoned.setattr(os, "getcwd", lambda: pytest.fail("the current folder was read"))
        poisoned.setattr(time, "time", lambda: pytest.fail("the clock was read"))
        again = plan(recipe, here)
        text = render_plan(again, here)
    assert again == before
    assert render_plan(before, here) == text


def test_every_problem_is_told_at_once_in_the_order_of_the_schema() -> None:
    recipe = job(
        resources={"nodes": 3, "device": "cuda"},
        parallelism={"strategy": "single"},
        network={"interface": "nope0"},
        env={"RANK": "0"},
    )
    with pytest.raises(RecipeError) as caught:
        plan(recipe, facts())
    keys = [problem.message.split(":")[0] for problem in caught.value.problems]
    assert keys == [
        "data.global_batch_size",
        "parallelism.strategy",
        "resources.device",
        "network.interface",
        "env.RANK",
    ]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RANK", "remove it"),
        ("MASTER_ADDR", "remove it"),
        ("LAUNCH_ANYTHING", "remove it"),
        ("TORCHELASTIC_RUN_ID", "remove it"),
        ("WORLD_SIZE", "use resources.nodes and resources.nproc_per_node"),
        ("MASTER_PORT", "use network.master_port"),
        ("WANDB_MODE", "use tracking.wandb.mode"),
    ],
)
def test_names_that_are_ours_cannot_be_set(name: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(job(env={name: "1"}), facts())
    (problem,) = caught.value.problems
    assert problem.message == f"env.{name}: the launcher sets {name} for each worker"
    assert problem.hint == hint


def test_variables_of_the_recipe_reach_the_workers_with_their_origin() -> None:
    made = plan(job(env={"A": "x y", "PYTHONUNBUFFERED": "0"}), facts(), origins={"env.A": "override env.A=x y"})
    assert env(made).items() >= {"A": "x y", "PYTHONUNBUFFERED": "0"}.items()
    assert origins(made)["A"] == "override env.A=x y"
    assert [variable.name for variable in made.env] == sorted(variable.name for variable in made.env)


def test_the_builtin_job_is_preloaded_and_resumable() -> None:
    made = plan(job(), facts())
    assert (made.worker.kind, made.worker.module, made.worker.script) == ("job", "jobs.train", None)
    assert made.worker.preload == ("torch._dynamo", "jobs.train")
    assert made.resumable
    assert made.limits.max_restarts == 3


@pytest.mark.parametrize(("preload", "modules"), [(False, None), (True, ()), (["numpy"], ("numpy",))])
def test_a_script_is_preloaded_on_request(preload: object, modules: tuple[str, ...] | None) -> None:
    made = plan(script(preload=preload, args=["--lr", "1e-4"]), facts())
    assert made.worker.preload == modules
    assert made.worker.argv == ("--lr", "1e-4")


def test_a_script_without_resume_is_not_restarted_and_that_is_said() -> None:
    made = plan(script(), facts())
    assert (made.resumable, made.limits.max_restarts) == (False, 0)
    assert any("nothing is restarted without `resume:`" in note for note in made.notes)
    assert plan(script(resume="self"), facts()).limits.max_restarts == 3


def test_limits_are_in_seconds() -> None:
    made = plan(job(network={"timeout": "90s"}, faults={"grace": "2m"}), facts())
    assert (made.limits.network_timeout_s, made.limits.grace_s) == (90.0, 120.0)
    assert plan(job(), facts()).limits.grace_s == 30.0


def test_device_numbers_are_those_of_nvidia_smi_unless_the_user_counted_otherwise() -> None:
    assert env(plan(job(), facts(gpus=2)))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in env(plan(job(), facts(gpus=2, environment={"CUDA_VISIBLE_DEVICES": "0,1"})))
    assert "CUDA_DEVICE_ORDER" in env(plan(job(), facts(gpus=1, environment={"CUDA_VISIBLE_DEVICES": "GPU-abc"})))
    assert "CUDA_DEVICE_ORDER" not in env(plan(job(), facts()))


def test_each_value_has_an_origin_and_auto_says_what_it_became() -> None:
    made = plan(job(resources={"nodes": 2}), facts(), origins={"resources.nodes": "flag --nodes"})
    values = {item.key: (item.value, item.origin) for item in made.values}
    assert values["resources.nodes"] == (2, "flag --nodes")
    assert values["resources.device"] == ("cpu", "auto: this machine has no GPU")
    assert values["train.accumulate"] == (1, "default")
    assert values["parallelism.strategy"] == ("ddp", "default")


def test_torchrun_lines_carry_flags_as_overrides() -> None:
    made = plan(
        job(resources={"nodes": 2}), facts(), origins={"resources.nodes": "flag --nodes"}, overrides=("train.seed=3",)
    )
    words = [shlex.split(line) for line in made.torchrun]
    assert [line[line.index("--node-rank") + 1] for line in words] == ["0", "1"]
    assert words[0][-5:] == ["-m", "jobs.train", "/home/ada/project/recipe.yaml", "train.seed=3", "resources.nodes=2"]


def test_torchrun_lines_give_each_node_its_gpus() -> None:
    made = plan(job(resources={"nodes": 2}), facts(gpus=4))
    assert ["CUDA_VISIBLE_DEVICES=2,3" in line for line in made.torchrun] == [False, True]


def test_torchrun_lines_keep_gpus_away_from_a_job_that_auto_put_on_cpu() -> None:
    assert plan(job(resources={"nodes": 2}), facts(gpus=1)).torchrun[0].endswith(" resources.device=cpu")


STAND_INS = """
env() { while [ "$1" != torchrun ]; do case "$1" in V*) printf '%s\\0' "${1#*=}";; esac; shift; done; "$@"; }
torchrun() { shift 13; for word; do printf '%s\\0' "$word"; done; }
"""
"""Print the values of V0, V1 ... and the script's arguments, each with a zero byte after it."""


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12), max_size=3))
@example(["=eth0", "a,b", "two words", "it's", '"', "$HOME", "one\ntwo", "", "é\n", "~", "\\", "*"])
def test_torchrun_lines_survive_a_shell(values: list[str]) -> None:
    variables = {f"V{number:02}": value for number, value in enumerate(values)}
    (line,) = plan(script(env=variables, args=values), facts()).torchrun
    assert "\n" not in line
    out = subprocess.run(["bash", "-c", STAND_INS + line], capture_output=True, check=True).stdout
    assert out.decode().split("\0")[:-1] == [*values, *values]


def test_a_thousand_nodes_are_planned_in_a_blink() -> None:
    recipe = job(batch=8192, resources={"nodes": 1024, "nproc_per_node": 8, "device": "cpu"})
    start = time.process_time()
    made = plan(recipe, facts(cpus=64))
    text = render_plan(made)
    assert time.process_time() - start < 0.25
    assert made.world_size == 8192
    assert len(text.splitlines()) < 80
    assert len(made.torchrun) == 1024


def test_a_large_plan_is_written_and_read_in_little_time() -> None:
    made = plan(job(batch=8192, resources={"nodes": 1024, "nproc_per_node": 8, "device": "cpu"}), facts())
    start = time.process_time()
    assert Plan.from_json(made.to_json()) == made
    assert time.process_time() - start < 0.5


def test_a_plan_of_another_version_is_refused() -> None:
    text = plan(job(), facts()).to_json().replace(f'"version": {PLAN_VERSION}', '"version": 0')
    with pytest.raises(ValueError, match=f"plan version 0 is not {PLAN_VERSION}"):
        Plan.from_json(text)


def test_run_directory_is_absolute() -> None:
    assert plan(job(), facts()).run_dir == "/home/ada/project/runs/r0"
    elsewhere = make_plan(loaded(job()), facts(), run_id="r0", runs_dir="/data/runs")
    assert elsewhere.run_dir == "/data/runs/r0"
