"""`launch doctor --on PROFILE`: real machines in namespaces, each with an sshd of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ssh_hosts import MakeSshBed, SshBed

pytestmark = [pytest.mark.process, pytest.mark.needs("ssh"), pytest.mark.timeout(240)]


def examined(bed: SshBed, *options: str, code: int = 0) -> list[dict[str, Any]]:
    done = bed.call("doctor", "--on", str(bed.profile), "--runs-dir", str(bed.folder / "runs"), "--json", *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr == ""
    return list(json.loads(done.stdout)["findings"])


def prepared(make_ssh_bed: MakeSshBed, count: int = 2) -> SshBed:
    """Hosts on which there is nothing wrong."""
    bed = make_ssh_bed(count)
    for host in bed.hosts:
        bed.on(host, "mount", "-o", "remount,size=2g", "/dev/shm")
    return bed


def of(found: list[dict[str, Any]], what: str, where: str = "") -> list[dict[str, Any]]:
    return [each for each in found if each["what"] == what and each["where"] == where]


def test_two_hosts_are_looked_at_alone_beside_each_other_and_together(make_ssh_bed: MakeSshBed) -> None:
    bed = prepared(make_ssh_bed)
    found = examined(bed)
    for host in bed.hosts:
        assert of(found, "torch", host.name)[0]["level"] == "ok"
        assert of(found, "/dev/shm", host.name)[0]["message"].startswith("/dev/shm: ")
        assert of(found, "GPUs", host.name)[0]["message"] == "none: runs use the CPU"
    (shared,) = of(found, "shared folder")
    assert (shared["level"], shared["message"]) == ("ok", f"{bed.folder}/runs is one folder on all 2 hosts")
    assert not (bed.folder / "runs").exists(), "what was made to look is gone"
    (clock,) = of(found, "clock")
    assert clock["message"].startswith("within ")
    (summed,) = of(found, "all-reduce")
    assert summed["message"].startswith("2 hosts, 2 processes over gloo: 64 MiB in ")
    (product,) = of(found, "matrix product")
    assert "TFLOP/s at least" in product["message"]
    for host in bed.hosts:
        assert bed.busy(host) == []


def test_a_host_without_the_folder_and_one_with_another_mtu(make_ssh_bed: MakeSshBed) -> None:
    bed = prepared(make_ssh_bed)
    (bed.folder / "own").mkdir()
    bed.own_disk(bed.folder / "own")
    bed.on(bed.hosts[1], "ip", "link", "set", "eth0", "mtu", "1300")
    found = examined(bed, "--no-all-reduce", "--runs-dir", str(bed.folder / "own" / "runs"), code=1)
    (shared,) = of(found, "shared folder")
    assert shared["level"] == "note"
    assert "what h0 writes is not seen by h1" in shared["message"]
    assert "checkpoint.store: replicate" in shared["fix"]
    (mtu,) = of(found, "MTU")
    assert (mtu["level"], mtu["message"]) == ("PROBLEM", "not the same on all hosts: h0 1500, h1 1300")
    assert not of(found, "all-reduce")


def test_a_host_that_does_not_answer_and_an_interpreter_that_is_not_there(make_ssh_bed: MakeSshBed) -> None:
    bed = make_ssh_bed(2)
    bed.stop_sshd(bed.hosts[1])
    bed.write_profile(python="/nowhere/python")
    found = examined(bed, code=1)
    (host,) = of(found, "host", "h1")
    assert host["level"] == "PROBLEM"
    assert "nothing listens there" in host["message"]
    assert host["fix"]
    (torch,) = of(found, "torch", "h0")
    assert torch["level"] == "PROBLEM"
    assert torch["message"].startswith("/nowhere/python cannot import it: ")


def test_a_link_between_hosts_that_is_cut_is_a_finding_and_no_wait_for_ever(make_ssh_bed: MakeSshBed) -> None:
    """The hosts answer to the caller, and not to each other."""
    bed = make_ssh_bed(2)
    first, second = bed.hosts
    bed.on(first, "iptables", "-A", "INPUT", "-s", second.address, "-j", "REJECT")
    found = examined(bed, code=1)
    (summed,) = of(found, "all-reduce")
    assert summed["level"] == "PROBLEM"
    assert "faults.preflight: true" in summed["fix"]
    for host in bed.hosts:
        assert bed.busy(host) == []


def test_what_is_printed_is_grouped_by_host(make_ssh_bed: MakeSshBed) -> None:
    bed = prepared(make_ssh_bed)
    done = bed.call("doctor", "--on", str(bed.profile), "--runs-dir", str(bed.folder / "runs"), "--no-all-reduce")
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line in ("h0", "h1", "together")] == ["h0", "h1", "together"]


def test_places_without_machines_to_ask_say_so(make_ssh_bed: MakeSshBed) -> None:
    bed = make_ssh_bed(1)
    for where, said in (("slurm", "salloc -N 2"), ("sky", "faults.preflight"), ("here", ""), ("ssh", "ssh.hosts=[")):
        done = bed.call("doctor", "--on", where, SLURM_JOB_ID="", SLURM_JOB_NODELIST="")
        assert done.returncode == 3, where
        assert said in done.stderr
        assert "Traceback" not in done.stderr
