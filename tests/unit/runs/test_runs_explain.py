"""Every variable, address, port and interface, with its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs_values as values
from pytest_regressions.file_regression import FileRegressionFixture

from launcher.planning.plan import CodePlan, EnvVar, NodePlan, Plan, Value
from launcher.planning.worker_env import worker_env
from launcher.runs.explain import as_fields, as_text, explain, rank_environment

RUNS = Path("/home/ada/runs")
STARTED = {"event": "attempt_started", "master_addr": "127.0.0.1"}
BEGIN: list[dict[str, Any]] = [
    {"event": "created"},
    {"event": "supervisor_started", "host": "here", "channel": {"address": "127.0.0.1", "port": 40001}},
    {
        "event": "node_bound",
        "node": 1,
        "host": "there",
        "address": "10.0.0.2",
        "cpus": [4, 5],
        "gpus": [],
        "env": {"TMPDIR": "/tmp/launch-k7qz"},
    },
]
EVENTS = [
    *BEGIN,
    {**STARTED, "attempt": 1, "master_port": 40002},
    {"event": "restarting", "attempt": 2, "restarts": 1},
    {**STARTED, "attempt": 2, "master_port": 40003},
    {"event": "tracking", "wandb": {"mode": "offline", "reason": "no key"}},
]


def make_plan(**fields: Any) -> Plan:
    node = {"host": "here", "address": "127.0.0.1", "cpus": (0, 1, 2, 3), "gpus": ()}
    wandb = {"mode": "auto", "project": None}
    known: dict[str, Any] = {
        "recipe": {"name": "mnist-ddp", "tracking": {"wandb": wandb}, "network": {"preset": "auto"}},
        "nodes": (NodePlan(index=0, **node), NodePlan(index=1, **node)),
        "nproc_per_node": 2,
        "env": (
            EnvVar(name="NCCL_DEBUG", value="WARN", origin="recipe:network.nccl.DEBUG"),
            EnvVar(name="TWO_LINES", value="a\nb", origin="recipe:env.TWO_LINES"),
        ),
        "values": (
            Value(key="network.interface", value="lo", origin="auto: all ranks are on this machine"),
            Value(key="network.timeout", value="10m", origin="override network.timeout=10m"),
        ),
        "env_unset": ("NCCL_ASYNC_ERROR_HANDLING",),
        "secrets": ("HF_TOKEN",),
        "setup": ("module load cuda",),
        "code": CodePlan(root="/opt/launcher", snapshot=False, reason="it is installed", sha256="ab" * 32),
    }
    return values.plan(RUNS, **{**known, **fields})


def test_everything_with_its_origin(file_regression: FileRegressionFixture) -> None:
    file_regression.check(as_text(explain(make_plan(), EVENTS)) + "\n")


def test_a_run_that_has_not_started_says_what_is_planned_and_what_is_chosen_later() -> None:
    text = as_text(explain(make_plan(), []))
    assert "planned, not bound yet" in text
    assert "(when the attempt starts)" in text
    assert "Addresses" not in text


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_is_told_exactly_what_it_gets(rank: int) -> None:
    """The agent makes the environment with the same function; this pins the values that explain passes to it."""
    plan = make_plan()
    rows = {row.name: row.value for row in rank_environment(plan, EVENTS, rank)}
    log = f"{plan.run_dir}/logs/attempt-2/node-{rank // 2}/rank-{rank}.error.json"
    expected = worker_env(
        plan,
        node=rank // 2,
        local_rank=rank % 2,
        attempt=2,
        restarts=1,
        master_addr="127.0.0.1",
        master_port=40003,
        error_file=log,
    )
    given = {"TMPDIR": "/tmp/launch-k7qz"} if rank >= 2 else {}
    assert rows == {**given, **expected, "HF_TOKEN": "***"}


def test_the_checkpoint_that_a_script_goes_on_from_is_shown() -> None:
    found = [*EVENTS, {**STARTED, "attempt": 3, "master_port": 40004, "resumes_from": "/data/out/checkpoint-500"}]
    rows = {row.name: row.value for row in rank_environment(make_plan(), found, 1)}
    assert rows["LAUNCH_RESUME_FROM"] == "/data/out/checkpoint-500"


def test_what_only_the_node_of_a_cluster_could_know_is_shown_with_who_found_it() -> None:
    """F035"""
    env = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0", "LAUNCH_ALLOCATION": "2"}
    rows = rank_environment(make_plan(), [*EVENTS, {**BEGIN[2], "env": env}], 2)
    origins = {row.name: row.origin for row in rows if row.name in env}
    found = "agent: the interface of its node that leads to node 0"
    allocation = "batch side: which allocation of the run this is, from 1"
    assert origins == {**dict.fromkeys(env, found), "LAUNCH_ALLOCATION": allocation}


def test_the_budget_of_a_resumed_run_is_fresh() -> None:
    resumed = [*EVENTS, {"event": "resumed"}, {**STARTED, "attempt": 3, "master_port": 40004}]
    rows = {row.name: row.value for row in rank_environment(make_plan(), resumed, 0)}
    assert (rows["MASTER_PORT"], rows["TORCHELASTIC_MAX_RESTARTS"]) == ("40004", "5")


def test_every_variable_of_a_worker_says_who_makes_it() -> None:
    origins = {row.origin for row in rank_environment(make_plan(device="cuda"), EVENTS, 3)}
    assert "agent" not in origins
    assert "" not in origins


def test_what_torchrun_tells_its_workers_of_itself_is_not_ours() -> None:
    rows = {row.name: row.value for row in rank_environment(make_plan(engine="torchrun"), EVENTS, 0)}
    assert rows["TORCHELASTIC_RUN_ID"] == "(torchrun's own)"
    assert rows["MASTER_PORT"] == "40003"


def test_a_fixed_port_is_the_recipes() -> None:
    rows = {row.name: row for row in rank_environment(make_plan(master_port=29500), [], 0)}
    assert (rows["MASTER_PORT"].value, rows["MASTER_PORT"].origin) == ("29500", "network.master_port")


def test_as_json() -> None:
    fields = as_fields(explain(make_plan(), EVENTS))
    assert fields["Secrets"] == [
        {"name": "HF_TOKEN", "value": "", "origin": "your environment; the value is kept nowhere"}
    ]
