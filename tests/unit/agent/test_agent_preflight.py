"""What the head agent makes of a preflight: whom it asks, and which node or link does not do."""

from __future__ import annotations

from typing import Any

import pytest
import runs_values

from launcher.agent import preflight_node
from launcher.agent.effects import Finish, Record, Say, Send
from launcher.agent.head import Head, Phase
from launcher.agent.preflight import LIMIT_S, Preflight, judge
from launcher.agent.preflight_node import way_of
from launcher.planning.plan import EnvVar
from launcher.runs.states import Cause

HOSTS = {0: "h0", 1: "h1", 2: "h2"}
REASON = "GLOO_SOCKET_IFNAME=eth0 (environment)"


def here(node: int, **more: Any) -> dict[str, Any]:
    report = {
        "kind": "here",
        "address": f"10.0.0.{node + 1}",
        "port": 4000 + node,
        "interface": "eth0",
        "said_by": REASON,
        "known": f"eth0 (10.0.0.{node + 1})",
        "mtu": 9000,
        "speed_mbps": None,
        "cpu_rate": 1000.0,
        "cpu_share": 1.0,
        "gpus": {},
    }
    return {**report, **more}


def links(node: int, **more: Any) -> dict[str, Any]:
    report = {"kind": "links", "failed": {}, "to": (node + 1) % 3, "bytes_per_s": 1e9}
    return {**report, "cpu_rate": 1000.0, "cpu_share": 1.0, **more}


def judged(
    *, of: dict[int, dict[str, Any]] | None = None, way: dict[int, dict[str, Any]] | None = None, hosts: Any = None
) -> list[str]:
    """The faults of three nodes that differ in this from ones that are well."""
    heres = {node: here(node, **(of or {}).get(node, {})) for node in HOSTS}
    ways = {node: links(node, **(way or {}).get(node, {})) for node in HOSTS}
    return list(judge(heres, ways, hosts or HOSTS))


def test_nodes_that_are_well() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("of", "way", "said"),
    [
        (
            {},
            {1: {"bytes_per_s": 2e6}},
            "from node 1 (h1) to node 2 (h2) the link carries 1.9 MiB/s",
        ),
        (
            {0: {"speed_mbps": 100_000}},
            {},
            "from node 0 (h0) to node 1 (h1) the link carries 953.7 MiB/s, and eth0 is one of 100000 Mb/s",
        ),
        (
            {},
            {2: {"bytes_per_s": 1e8}},
            "from node 2 (h2) to node 0 (h0) the link carries 95.4 MiB/s, and half of the others more than 953.7 MiB/s",
        ),
        (
            {1: {"mtu": 1500}},
            {0: {"bytes_per_s": 0.0}},
            "from node 0 (h0) to node 1 (h1) small messages get through, and large ones do not: the MTU is 9000 there "
            "and 1500 here",
        ),
        (
            {1: {"cpu_rate": 90.0, "cpu_share": 0.1}},
            {1: {"cpu_rate": 100.0, "cpu_share": 0.12}},
            "node 1 (h1) is 10.0 times as slow as node 0 (h0): it gets 12% of a CPU, for a quota or for what else runs "
            "there",
        ),
        (
            {},
            {0: {"failed": {"1": "no answer within 2 s"}}, 2: {"failed": {"1": "no answer within 2 s"}}},
            "no other node reaches node 1 (h1) at 10.0.0.2 (eth0): no answer within 2 s; a firewall, or the wrong "
            f"interface: {REASON}; interfaces there: eth0 (10.0.0.2)",
        ),
        (
            {},
            {0: {"failed": {"1": "Connection refused"}}},
            "node 0 (h0) by eth0 does not reach node 1 (h1) at 10.0.0.2 (eth0): Connection refused; a firewall, or the "
            f"wrong interface: {REASON}; interfaces there: eth0 (10.0.0.2)",
        ),
    ],
)
def test_each_fault_is_named(of: dict[int, Any], way: dict[int, Any], said: str) -> None:
    assert judged(of=of, way=way) == [said]


def test_a_moments_neighbour_and_nodes_of_one_machine_are_no_fault() -> None:
    assert judged(of={1: {"cpu_rate": 50.0}}) == [], "the second measurement is as good as the others"
    slow = {1: {"cpu_rate": 50.0}}
    assert judged(of=slow, way=slow, hosts={0: "h0", 1: "h0", 2: "h0"}) == []


def test_nodes_of_which_none_reaches_another_are_told_in_pairs() -> None:
    faults = judged(way={node: {"failed": {str(peer): "x" for peer in HOSTS if peer != node}} for node in HOSTS})
    assert len(faults) == 6
    assert all("does not reach" in fault for fault in faults)


def gpus(**values: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"gpus": {"wanted": 1, "values": {"gpu0/power_w": 70.0, **named}}}


def ended_by(*reports: dict[str, Any]) -> tuple[str, ...]:
    check = Preflight(nonce="ab")
    check.begin(HOSTS, 0.0)
    for node, report in enumerate(reports):
        check.heard(node, report, 0.1)
    assert check.is_over
    return check.faults


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (gpus(gpu0__ecc_uncorrected=2), "GPU 0 has 2 memory errors that ECC could not correct"),
        (gpus(gpu0__lost=1), "GPU 0 has fallen off its bus"),
        (gpus(gpu0__throttle_reasons=0x40), "GPU 0 is held back by its hardware"),
        ({"gpus": {"wanted": 8, "values": {"gpu0/power_w": 1.0}}}, "8 workers need a GPU each, and 1 are there"),
        ({"address": "127.0.0.1"}, "is loopback, and no other node reaches 127.0.0.1"),
    ],
)
def test_a_node_that_does_not_do_is_named_before_any_link_is_tried(of: dict[str, Any], said: str) -> None:
    (fault,) = ended_by(here(0), here(1, **of), here(2))
    assert fault.startswith("node 1 (h1): ")
    assert said in fault


def test_an_idle_gpu_and_one_that_nobody_can_ask_are_no_fault() -> None:
    check = Preflight(nonce="ab")
    check.begin({0: "h0", 1: "h1"}, 0.0)
    check.heard(0, here(0, **gpus(gpu0__throttle_reasons=0x1)), 0.1)
    check.heard(1, here(1, gpus={"wanted": 8, "note": "no pynvml"}), 0.1)
    assert not check.is_over


def test_fewer_nvlinks_than_elsewhere() -> None:
    faults = ended_by(here(0, **gpus(gpu0__nvlinks_up=18)), here(1, **gpus(gpu0__nvlinks_up=17)), here(2, **gpus()))
    assert faults[0] == "node 1 (h1): 17 NVLinks work, and 18 on other nodes"


def test_the_rounds_and_what_a_lost_node_means() -> None:
    check = Preflight(nonce="ab")
    asked = check.begin(HOSTS, 10.0)
    assert asked == [Send({"type": "preflight", "nonce": "ab"}, node) for node in HOSTS]
    assert check.begin(HOSTS, 10.1) == [], "they are asked once"
    assert [check.heard(node, here(node), 10.2) for node in (0, 1)] == [[], []]
    told = check.heard(2, here(2), 10.3)
    assert [
        (each.node, [peer["node"] for peer in each.message["peers"]]) for each in told if isinstance(each, Send)
    ] == [
        (0, [1, 2]),
        (1, [2, 0]),
        (2, [0, 1]),
    ]
    check.lost()
    assert check.heard(0, links(0), 10.4) == [], "of before"
    assert check.begin(HOSTS, 11.0) == asked
    for node in HOSTS:
        check.heard(node, here(node), 11.1)
    for node in HOSTS:
        effects = check.heard(node, links(node), 11.5)
    assert check.is_over
    (record,) = effects
    assert isinstance(record, Record)
    assert (record.event, record.fields["took_s"], record.fields["faults"]) == ("preflight", 0.5, [])
    assert check.words == "preflight: 3 nodes reach each other, the slowest link 953.7 MiB/s"


def test_a_node_that_says_nothing_is_named_when_the_time_is_over() -> None:
    check = Preflight(nonce="ab")
    check.begin(HOSTS, 0.0)
    check.heard(0, here(0), 0.1)
    check.heard(2, here(2), 0.1)
    assert check.tick(LIMIT_S - 0.1) == []
    check.tick(LIMIT_S)
    assert check.faults == ("node 1 (h1) has not answered within 8 s; its driver may hang",)
    assert "`faults.preflight: false` starts all the same" in check.words


def head(**more: Any) -> Head:
    return Head(
        node_count=2,
        max_restarts=0,
        resumable=False,
        grace_s=5.0,
        join_timeout_s=60.0,
        pick_port=lambda: 29500,
        hosts={0: "h0", 1: "h1"},
        master_addr="10.0.0.1",
        now_s=0.0,
        preflight=Preflight(nonce="ab"),
        **more,
    )


def joined() -> tuple[Head, list[Any]]:
    of = head()
    effects = []
    for node in (0, 1):
        of.joined(node, f"h{node}")
        effects = of.ready(node)
    return of, effects


def test_the_first_attempt_waits_for_it_and_then_starts() -> None:
    of, effects = joined()
    assert [each.message["type"] for each in effects if isinstance(each, Send)] == ["preflight", "preflight"]
    for node in (0, 1):
        of.preflighted(node, here(node))
    assert of.phase is Phase.JOINING
    of.preflighted(0, links(0, to=1))
    effects = of.preflighted(1, links(1, to=0))
    assert [each.message["type"] for each in effects if isinstance(each, Send)] == ["start"]
    assert of.attempt == 1


def test_a_fault_ends_the_run_and_nothing_has_started() -> None:
    of, _ = joined()
    of.preflighted(0, here(0))
    effects = of.preflighted(1, {"kind": "fault", "fault": "nothing can listen at 10.0.0.2"})
    of.ready(0)
    effects += of.ready(1)
    (end,) = [each for each in effects if isinstance(each, Finish)]
    assert (end.cause, end.exit_code, of.attempt) == (Cause.PREFLIGHT, 1, 0)
    assert end.reason.startswith(
        "the preflight: node 1 (h1): nothing can listen at 10.0.0.2. `launch doctor` says more"
    )
    assert any(isinstance(each, Say) and "nothing can listen" in each.text for each in effects)


def test_a_node_that_is_lost_in_it_comes_again_and_all_begin_again() -> None:
    of, _ = joined()
    of.preflighted(0, here(0))
    of.lost(1, "its process ended")
    of.joined(1, "h1")
    effects = of.ready(1)
    assert [each.message["type"] for each in effects if isinstance(each, Send)] == ["preflight", "preflight"]


@pytest.mark.parametrize(
    ("backend", "value", "interface"),
    [
        ("gloo", "eth1", "eth1"),
        ("nccl", "=eth1", "eth1"),
        ("nccl", "eth", "eth0"),
        ("nccl", "^docker", "eth0"),
        ("nccl", "=ib0,eth1", "eth1"),
        ("gloo", "", "eth0"),
    ],
)
def test_the_interface_is_the_one_that_the_library_will_take(
    backend: str, value: str, interface: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.agent.addresses import Address

    known = (Address("lo", "127.0.0.1"), Address("eth0", "10.0.0.1"), Address("eth1", "10.0.1.1"))
    monkeypatch.setattr(preflight_node.addresses, "own_addresses", lambda: known)
    name = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    env = (EnvVar(name=name, value=value, origin="environment"),) if value else ()
    nodes = [{"index": 0, "host": "h0", "address": "10.0.0.1", "cpus": (), "gpus": ()}]
    from launcher.planning.plan import NodePlan

    plan = runs_values.plan(tmp_path, backend=backend, env=env, nodes=tuple(NodePlan(**node) for node in nodes))
    found = way_of(plan, 0, {})
    assert found["interface"] == interface
    assert found["said_by"] == (f"{name}={value} (environment)" if value else "the way to node 0")
