"""The batch side, without a job: what it refuses, and where it puts the head agent."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from agent_values import slurm_plan

from launcher.agent import addresses, batch, endpoint, scheduler
from launcher.agent.addresses import Address
from launcher.agent.batch import BatchError
from launcher.agent.endpoint import EndpointError
from launcher.runs.events import read_events
from launcher.runs.rundir import RunDir


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("name", ["SLURM_HET_SIZE", "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_NNODES_PACK_GROUP_1"])
def test_a_heterogeneous_job_is_refused(name: str) -> None:
    """F054."""
    with pytest.raises(BatchError, match=f"a part of a heterogeneous job \\({name} is set\\)"):
        batch.refuse_heterogeneous({name: "2"})
    batch.refuse_heterogeneous({"SLURM_JOB_NODELIST": "n1"})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("plan version 1 is not 2, the one this launcher reads"), "plan version 1 is not 2"),
        (json.JSONDecodeError("Expecting value", '{"x":', 5), "it is damaged: Expecting value: line 1"),
        (KeyError("nodes"), "it is damaged: 'nodes'"),
    ],
    ids=["another version", "half a file", "something is missing"],
)
def test_a_plan_that_cannot_be_read_ends_the_run_with_a_sentence(tmp_path: Path, error: Exception, said: str) -> None:
    """Between two allocations somebody has installed another version, say."""
    run = RunDir(tmp_path)
    run.console.parent.mkdir()
    assert batch.refuse_plan(run, error) == 3
    ended = [event for event in read_events(tmp_path) if event["event"] == "finished"]
    assert [(event["state"], event["cause"], event["exit_code"]) for event in ended] == [("FAILED", "refused", 3)]
    assert said in ended[0]["reason"]
    assert said in run.console.read_text()


def test_a_run_directory_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    """Its disk is full or away, or somebody has removed it: no traceback, and SLURM hears that it failed."""
    run = RunDir(tmp_path)
    run.plan.write_text(slurm_plan(tmp_path).to_json())
    run.events.write_text("not a folder")
    argv = [sys.executable, "-m", "launcher.agent", "--run-dir", str(tmp_path), "--batch"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 3
    assert done.stderr == f"launch: the run directory {tmp_path} cannot be used: File exists: {run.events}\n"


def test_a_job_and_a_task_of_an_array_have_their_names() -> None:
    assert batch.job_ident({"SLURM_JOB_ID": "12"}) == "12"
    array = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert batch.job_ident(array) == "12_3"


def test_one_node_needs_nobody_else() -> None:
    head = endpoint.choose_head(["n1"], "auto")
    assert head.endpoint[0] == "127.0.0.1"
    assert head.interface == "lo"
    head.holder.close()


def test_the_port_is_held_for_the_head_agent_and_outside_the_kernels_range() -> None:
    head = endpoint.choose_head(["n1"], "auto")
    low, high = endpoint._ephemeral()
    assert not low <= head.endpoint[1] <= high
    with socket.create_server(head.endpoint) as listener:
        assert listener.getsockname()[1] == head.endpoint[1]
    head.holder.close()


def test_loopback_is_no_address_for_two_nodes() -> None:
    """F033 F035."""
    with pytest.raises(EndpointError, match=r"network.interface: by lo \(127.0.0.1\) no other node reaches n1"):
        endpoint.choose_head(["n1", "n2"], "lo")


def test_an_interface_that_is_not_there_is_an_error_with_those_that_are() -> None:
    """F037."""
    with pytest.raises(EndpointError, match=r"n1 has no interface nope0 with an address; it has .*lo \(127.0.0.1\)"):
        endpoint.choose_head(["n1", "n2"], "nope0")


def test_peers_that_nobody_knows_are_an_error_and_never_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """F033 F034: no address is better than one of a world of one."""
    monkeypatch.setattr(addresses, "own_addresses", lambda: (Address("lo", "127.0.0.1"),))
    with pytest.raises(
        EndpointError, match=r"no address of n1 leads to the other nodes \(tried no-such-host.invalid\)"
    ):
        endpoint.choose_head(["n1", "no-such-host.invalid"], "auto")


def test_the_address_is_the_one_that_leads_to_what_slurm_calls_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """F033: NodeAddr before the name, which may mean something else here."""
    known = (Address("lo", "127.0.0.1"), Address("ib0", "127.0.0.2"))
    asked = []

    def leads_to(peer: str) -> str:
        asked.append(peer)
        return "127.0.0.2"

    monkeypatch.setattr(addresses, "own_addresses", lambda: known)
    monkeypatch.setattr(addresses, "leads_to", leads_to)
    monkeypatch.setattr(scheduler, "node_address", lambda host: f"{host}-ib")
    head = endpoint.choose_head(["n1", "n2"], "auto")
    assert (head.endpoint[0], head.interface, asked) == ("127.0.0.2", "ib0", ["n2-ib"])
    head.holder.close()
