"""`faults.preflight` of a run on hosts that ssh reaches."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ssh_hosts import MakeSshBed, SshBed
from tiny import tiny

from launcher.runs.events import read_events

pytestmark = [pytest.mark.process, pytest.mark.needs("ssh"), pytest.mark.timeout(240)]


def launched(bed: SshBed, folder: Path) -> subprocess.CompletedProcess[str]:
    target = folder / "tiny.yaml"
    sections: dict[str, Any] = {"train": {"until": "3 steps"}, "faults": {"preflight": True}}
    target.write_text(json.dumps(tiny(**sections)))
    return bed.call(str(target), "--nodes", "2", "--on", str(bed.profile), "--runs-dir", str(folder / "runs"))


def test_hosts_that_do_and_hosts_that_do_not_reach_each_other(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(2)
    done = launched(bed, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preflight: 2 nodes reach each other" in done.stdout + done.stderr
    bed.on(bed.hosts[1], "iptables", "-A", "INPUT", "-s", bed.hosts[0].address, "-p", "tcp", "--syn", "-j", "DROP")
    done = launched(bed, tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "no other node reaches node 1 (h1) at 198.18.90.11 (eth0): no answer within 2 s" in text
    assert "Traceback" not in text
    ends = [
        event for run in (tmp_path / "runs").iterdir() for event in read_events(run) if event["event"] == "finished"
    ]
    assert sorted(event["cause"] for event in ends) == ["done", "preflight"]
    assert [bed.busy(host) for host in bed.hosts] == [[], []]
