"""`faults.preflight`: nodes and links that do not do, on namespaces that are machines to all that matters."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Bed, Host, HostsRun, MakeBed
from launched import LAUNCH
from tiny import tiny

pytestmark = [pytest.mark.process, pytest.mark.needs("netns"), pytest.mark.timeout(240)]

COST_S = 3.0
"""What it may take beside the start."""


def planned(bed: Bed, *, nodes: int = 2) -> HostsRun:
    path = bed.folder / "preflight.yaml"
    sections: dict[str, Any] = {
        "name": "preflight",
        "train": {"until": "3 steps"},
        "checkpoint": {"every": None},
        "resources": {"nproc_per_node": 1, "threads": 1},
        "faults": {"preflight": True},
    }
    path.write_text(json.dumps(tiny(**sections)))
    return bed.plan(path, nodes=nodes)


def on(host: Host, *argv: str) -> None:
    done = subprocess.run(host.inside(*argv), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def refused(run: HostsRun) -> str:
    """The reason of a run that was ended before it began, by what its preflight has found."""
    assert run.wait() == 1
    result = run.result
    assert (result["state"], result["cause"], result["attempts"]) == ("FAILED", "preflight", 0), run.text
    assert not run.happened("worker_started"), "nothing has trained"
    (found,) = run.happened("preflight")
    assert result["reason"] in run.text
    assert all(text in result["reason"] for text in found["faults"][:3])
    for host in run.bed.hosts:
        assert host.pids() == {}, "nothing is left"
    return str(result["reason"])


def test_nodes_that_do_are_found_to_in_a_moment_and_then_train(make_bed: MakeBed) -> None:
    run = planned(make_bed(4), nodes=4)
    run.start()
    assert run.wait() == 0
    (found,) = run.happened("preflight")
    assert found["faults"] == []
    assert found["took_s"] < COST_S
    assert {node["interface"] for node in found["nodes"].values()} == {"eth0"}
    assert all(node["bytes_per_s"] > 10e6 for node in found["nodes"].values())
    assert "preflight: 4 nodes reach each other, the slowest link" in run.text
    for host in run.bed.hosts:
        assert host.pids() == {}


def test_loopback_as_the_interface_of_several_machines(make_bed: MakeBed) -> None:
    run = planned(make_bed(2))
    run.env["GLOO_SOCKET_IFNAME"] = "lo"
    run.start()
    said = refused(run)
    assert "node 0 (h0): GLOO_SOCKET_IFNAME=lo (the node's environment) is loopback" in said
    assert "no other node reaches 127.0.0.1; interfaces there: lo (127.0.0.1), eth0 (198.18.90.10)" in said
    report = subprocess.run([LAUNCH, "report", str(run.run.path)], capture_output=True, text=True, check=False)
    assert "GLOO_SOCKET_IFNAME=lo (the node's environment) is loopback" in report.stdout
    assert "faults.preflight=false" in report.stdout, "what to do"
    assert report.stderr == ""


def test_an_interface_that_leads_nowhere(make_bed: MakeBed) -> None:
    bed = make_bed(2)
    for host in bed.hosts:
        on(host, "ip", "link", "add", "eth1", "type", "veth", "peer", "name", "nowhere")
        on(host, "ip", "addr", "add", f"10.77.{host.number}.1/24", "dev", "eth1")
        on(host, "ip", "link", "set", "eth1", "up")
    run = planned(bed)
    run.env["GLOO_SOCKET_IFNAME"] = "eth1"
    run.start()
    said = refused(run)
    assert "node 0 (h0) by eth1 does not reach node 1 (h1) at 10.77.1.1 (eth1): " in said
    assert "a firewall, or the wrong interface: GLOO_SOCKET_IFNAME=eth1" in said


def test_a_firewall_on_one_node(make_bed: MakeBed) -> None:
    bed = make_bed(4)
    on(bed.hosts[1], "iptables", "-A", "INPUT", "-i", "eth0", "-p", "tcp", "--syn", "-j", "DROP")
    run = planned(bed, nodes=4)
    run.start()
    said = refused(run)
    assert "no other node reaches node 1 (h1) at 198.18.90.11 (eth0): no answer within 2 s" in said
    assert "node 2" not in said.partition("no other node")[2].partition(";")[0]


def test_a_link_that_is_slow(make_bed: MakeBed) -> None:
    bed = make_bed(2)
    shape = ("root", "tbf", "rate", "20mbit", "burst", "64kb", "latency", "50ms")
    on(bed.hosts[1], "tc", "qdisc", "add", "dev", "eth0", *shape)
    run = planned(bed)
    run.start()
    said = refused(run)
    assert "from node 1 (h1) to node 0 (h0) the link carries 2." in said
    assert "MiB/s" in said


@pytest.fixture
def cpu_group() -> Iterator[Path]:
    """A control group for CPU time, of version 1 or 2."""
    for above in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        folder = above / f"launch-test-preflight-{id(above)}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / "cpu.cfs_quota_us").exists() or (folder / "cpu.max").exists():
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group for CPU time can be made here")


def throttle(group: Path, percent: int) -> None:
    if (v1 := group / "cpu.cfs_quota_us").exists():
        v1.write_text(str(percent * 1000))
    else:
        (group / "cpu.max").write_text(f"{percent * 1000} 100000")


def test_a_node_that_is_slow(make_bed: MakeBed, cpu_group: Path) -> None:
    run = planned(make_bed(2))
    run.start(1)
    run.wait_for_event("agent_started", node=1)
    for pid in run.bed.hosts[1].pids().values():
        (cpu_group / "cgroup.procs").write_text(str(pid))
    throttle(cpu_group, 5)
    run.start(0)
    run.wait_for_event("preflight")
    throttle(cpu_group, 100)
    said = refused(run)
    assert "node 1 (h1) is " in said
    assert "times as slow as node 0 (h0): it gets " in said
    assert "of a CPU, for a quota or for what else runs there" in said
