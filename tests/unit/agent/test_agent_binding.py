"""A plan meets its node: ranks, addresses, devices, interfaces, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs_values
from agent_values import slurm_plan

from launcher.agent import addresses
from launcher.agent.__main__ import endpoint
from launcher.agent.addresses import Address
from launcher.agent.allocation import Allocation, from_environment, to_environment
from launcher.agent.binding import NodeError, bind, bind_host, node_index
from launcher.planning.plan import EnvVar, NodePlan, local_agent_argv, node_agent_argv
from launcher.runs.states import Cause

ENV = {"SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[3-4]"}
KNOWN = (Address("lo", "127.0.0.1"), Address("ib0", "10.1.0.4"), Address("eth0", "10.0.0.4"))


def bound(plan: Any, node: int = 1, **fields: Any) -> Any:
    known: dict[str, Any] = {
        "env": ENV, "host": "n4", "head": "10.0.0.3", "cpus": {0, 1}, "known": KNOWN,
        "leads_to": lambda head: "10.0.0.4",
    }  # fmt: skip
    return bind(plan, node, **{**known, **fields})


def test_hosts_in_the_order_of_the_job_and_this_nodes_address(tmp_path: Path) -> None:
    """F032 F033: node 0 is the first of the list, by the address that the batch side has found."""
    plan = bound(slurm_plan(tmp_path)).plan
    assert [(node.host, node.address) for node in plan.nodes] == [("n3", "10.0.0.3"), ("n4", "10.0.0.4")]
    assert plan.nodes[1].cpus == (0, 1)


def test_the_interface_that_leads_to_the_head_node_is_each_nodes_own(tmp_path: Path) -> None:
    """F035 F037: by name, exactly, where the plan leaves it open."""
    plan = bound(slurm_plan(tmp_path), leads_to=lambda head: "10.1.0.4").plan
    assert {each.name: (each.value, each.origin) for each in plan.env} == {
        "GLOO_SOCKET_IFNAME": ("ib0", "node"),
        "NCCL_SOCKET_IFNAME": ("=ib0", "node"),
        "TP_SOCKET_IFNAME": ("ib0", "node"),
    }


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    given = (EnvVar(name="GLOO_SOCKET_IFNAME", value="ib0", origin="recipe:env"),)
    env = {each.name: each.value for each in bound(slurm_plan(tmp_path, env=given)).plan.env}
    assert env == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=eth0", "TP_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(("name", "value"), [("GLOO_SOCKET_IFNAME", "nope0"), ("NCCL_SOCKET_IFNAME", "=nope0")])
def test_an_interface_that_is_not_on_this_node_is_said_before_a_worker_starts(
    tmp_path: Path, name: str, value: str
) -> None:
    """F037: with the node, and what it has."""
    given = (EnvVar(name=name, value=value, origin="recipe:network.interface"),)
    with pytest.raises(NodeError, match=r"n4 has no such interface .* it has lo \(127.0.0.1\), ib0 \(10.1.0.4\)"):
        bound(slurm_plan(tmp_path, env=given))


@pytest.mark.parametrize("value", ["eth", "^docker", "ib0,eth0", "=eth0,nope0"])
def test_prefixes_and_exclusions_of_nccl_are_its_own_affair(tmp_path: Path, value: str) -> None:
    given = (EnvVar(name="NCCL_SOCKET_IFNAME", value=value, origin="environment"),)
    assert bound(slurm_plan(tmp_path, env=given)).plan.env[1].value == value


def test_no_way_to_the_head_node_names_both_ends(tmp_path: Path) -> None:
    """F033."""
    with pytest.raises(
        NodeError, match=r"no way leads to the head node at 10.0.0.3; interfaces here: lo \(127.0.0.1\)"
    ):
        bound(slurm_plan(tmp_path), leads_to=lambda head: None)


def test_variables_of_our_task_are_not_the_workers(tmp_path: Path) -> None:
    """F031: those of the job stay; those that say 'rank 1 of 2' of the agent go, in all their forms."""
    task = {"SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "PMI_RANK": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASK_PID": "9", "SLURM_GTIDS": "1", "PMIX_RANK": "1",
            "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_NPROCS": "2"}  # fmt: skip
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_RESTART_COUNT": "1", "SLURM_CPUS_PER_TASK": "2",
           "SLURM_JOB_NUM_NODES": "2", "SLURM_ARRAY_TASK_ID": "3"}  # fmt: skip
    unset = set(bound(slurm_plan(tmp_path), env={**ENV, **task, **job}).plan.env_unset)
    assert {*task, "SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES"} <= unset
    assert {"LAUNCH_HEAD", "LAUNCH_SECONDS_LEFT", "LAUNCH_NODES"} <= unset
    assert not job.keys() & unset


def test_gpus_as_slurm_names_them(tmp_path: Path) -> None:
    """F041: the device of a worker is its local rank among those that are visible, and none is made up."""
    plan = slurm_plan(tmp_path, device="cuda", nproc_per_node=2)
    assert bound(plan, env={**ENV, "CUDA_VISIBLE_DEVICES": "2,3"}).plan.nodes[1].gpus == (2, 3)
    assert bound(plan, env={**ENV, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}).plan.nodes[1].gpus == ()
    assert bound(plan, env={**ENV, "CUDA_VISIBLE_DEVICES": "0,1,2"}).plan.nodes[1].gpus == (0, 1, 2)
    assert bound(plan).plan.nodes[1].gpus == ()
    for given, number in (("2", 1), ("", 0), ("GPU-a", 1)):
        said = rf"2 workers need a GPU each, and SLURM has given {number} \(CUDA_VISIBLE_DEVICES={given}\)"
        with pytest.raises(NodeError, match=said) as caught:
            bound(plan, env={**ENV, "CUDA_VISIBLE_DEVICES": given})
        assert caught.value.cause is Cause.USAGE


def test_fewer_cpus_than_asked_for_is_a_warning(tmp_path: Path) -> None:
    """F014."""
    (warning,) = bound(slurm_plan(tmp_path), cpus={1}).warnings
    assert warning.startswith("node 1 (n4) may use 1 of the 2 CPUs that were asked for")
    assert bound(slurm_plan(tmp_path)).warnings == ()


def test_which_node_this_is() -> None:
    assert node_index(ENV, 2) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_PROCID": "2"}, "this is task 2 on node 1 of the job: there must be one task on each node"),
        ({"SLURM_STEP_NUM_NODES": "3"}, "the job has 3 nodes, and the plan has 2"),
        ({"SLURM_NODEID": ""}, "a task is started by srun"),
        ({"SLURM_NODEID": "2", "SLURM_PROCID": "2"}, "this is node 2 of the job, and the plan has 2"),
    ],
)
def test_a_job_that_is_not_the_plans_is_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(NodeError, match=said) as caught:
        node_index({**ENV, **change}, 2)
    assert caught.value.cause is Cause.RENDEZVOUS


def test_of_a_range_the_job_may_have_fewer_nodes() -> None:
    assert node_index({**ENV, "SLURM_STEP_NUM_NODES": "2"}, 4, at_least=2) == 1
    with pytest.raises(NodeError, match="the job has 1 nodes, and the plan has 4"):
        node_index({**ENV, "SLURM_STEP_NUM_NODES": "1"}, 4, at_least=2)


def test_the_nodes_that_a_smaller_job_lacks_have_no_name(tmp_path: Path) -> None:
    wanted = tuple(NodePlan(index=index, host="", address="", cpus=(), gpus=()) for index in range(4))
    plan = bound(slurm_plan(tmp_path, nodes=wanted, min_nodes=2)).plan
    assert [node.host for node in plan.nodes] == ["n3", "n4", "?", "?"]
    fixed = bound(slurm_plan(tmp_path, nodes=wanted)).plan
    assert [node.host for node in fixed.nodes] == ["?", "n4", "?", "?"], "a list of another size is not believed"


def test_a_machine_that_no_scheduler_has_given_keeps_the_plans_cpus_and_finds_its_interface(tmp_path: Path) -> None:
    given = tuple(NodePlan(index=index, host="", address="", cpus=(index,), gpus=()) for index in range(2))
    plan = runs_values.plan(tmp_path, nodes=given)
    own = bind_host(plan, 1, host="b", head="10.0.0.3", known=KNOWN, env={}, leads_to=lambda head: "10.0.0.4")
    assert [(node.host, node.address, node.cpus) for node in own.nodes] == [
        ("", "10.0.0.3", (0,)),
        ("b", "10.0.0.4", (1,)),
    ]
    assert {each.name: each.value for each in own.env}["GLOO_SOCKET_IFNAME"] == "eth0"
    head = bind_host(plan, 0, host="a", head="10.0.0.4", known=KNOWN, env={})
    assert (head.nodes[0].host, head.nodes[0].address) == ("a", "10.0.0.4")


def test_an_interface_that_setup_or_a_providers_script_has_named_stays(tmp_path: Path) -> None:
    given = tuple(NodePlan(index=index, host="", address="", cpus=(), gpus=()) for index in range(2))
    plan = runs_values.plan(tmp_path, nodes=given)
    own = bind_host(plan, 0, host="a", head="10.0.0.4", known=KNOWN, env={"NCCL_SOCKET_IFNAME": "=eth0,eth1"})
    names = {each.name for each in own.env}
    assert "NCCL_SOCKET_IFNAME" not in names, "the workers inherit it"
    assert "GLOO_SOCKET_IFNAME" in names
    with pytest.raises(NodeError, match=r"GLOO_SOCKET_IFNAME=enp9 \(the environment of the node\): a has no such"):
        bind_host(plan, 0, host="a", head="10.0.0.4", known=KNOWN, env={"GLOO_SOCKET_IFNAME": "enp9"})


@pytest.mark.parametrize(
    ("text", "found"), [("10.0.0.3:20001", ("10.0.0.3", 20001)), ("[fd00::3]:20001", ("fd00::3", 20001))]
)
def test_where_the_head_listens_is_told_as_one_word(text: str, found: tuple[str, int]) -> None:
    argv = node_agent_argv(local_agent_argv("/usr/bin/python3", "/runs/r0"), 1, found)
    assert argv[-4:] == ("--node", "1", "--head", text)
    assert "--local" not in argv
    assert endpoint(text) == found


@pytest.mark.parametrize("text", ["10.0.0.3", ":20001", "10.0.0.3:", "10.0.0.3:99999", "10.0.0.3:x"])
def test_half_an_endpoint_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        endpoint(text)


@pytest.mark.parametrize("nodes", [None, 3])
@pytest.mark.parametrize("head", [("10.0.0.3", 20001), ("fd00::3", 20001)])
@pytest.mark.parametrize("left", [None, 90.0])
def test_what_the_batch_side_tells_the_tasks(head: tuple[str, int], left: float | None, nodes: int | None) -> None:
    told = from_environment(to_environment(3, head, left, nodes=nodes), now_s=100.0)
    assert told == Allocation(number=3, head=head, ends_s=None if left is None else 190.0, nodes=nodes)


def test_a_task_without_a_batch_side_says_so() -> None:
    with pytest.raises(ValueError, match="LAUNCH_HEAD and LAUNCH_ALLOCATION are not set"):
        from_environment({}, now_s=0.0)


def test_own_addresses_have_loopback_and_no_link_local() -> None:
    known = addresses.own_addresses()
    assert addresses.interface_of("127.0.0.1", known) == "lo"
    assert not [each for each in known if each.address.startswith("fe80")]


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.0.1.1", "localhost", "no-such-host.invalid"])
def test_a_name_that_is_only_local_leads_nowhere(peer: str) -> None:
    """F033: 127.0.1.1 of /etc/hosts, and names that nobody knows."""
    assert addresses.leads_to(peer) is None
