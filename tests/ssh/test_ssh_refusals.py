"""What keeps a run from going to a host: one sentence each, exit 3, and nothing is left, here or there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launched import Recipe
from ssh_hosts import MakeSshBed, SshBed, make_key
from tiny import tiny

pytestmark = [pytest.mark.process, pytest.mark.needs("ssh"), pytest.mark.timeout(120)]


def launched(bed: SshBed, folder: Path, *arguments: str, nodes: int = 1) -> subprocess.CompletedProcess[str]:
    target = folder / "tiny.yaml"
    target.write_text(json.dumps(tiny()))
    runs = ("--runs-dir", str(folder / "runs"))
    return bed.call(str(target), "--nodes", str(nodes), "--on", str(bed.profile), *runs, *arguments)


def is_refused(done: subprocess.CompletedProcess[str], folder: Path, bed: SshBed, *words: str) -> None:
    assert done.returncode == 3, done.stdout + done.stderr
    text = done.stderr
    for word in words:
        assert word in text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 2 * text.count("hint:"), "a sentence, and what to do"
    assert not (folder / "runs").exists()
    assert not list(folder.glob(".launch-*"))
    assert [bed.busy(host) for host in bed.hosts if host.is_up] == [[]] * len(bed.hosts)


def test_a_wrong_key(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    make_key(tmp_path / "other")
    bed.config.write_text(bed.config.read_text().replace(f"{bed.folder}/key\n", f"{tmp_path}/other\n"))
    is_refused(launched(bed, tmp_path), tmp_path, bed, "h0: it does not let you in: ", "Permission denied", "ssh -F ")


def test_an_unknown_name(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    bed.write_profile(hosts=["nowhere.invalid"])
    is_refused(launched(bed, tmp_path), tmp_path, bed, "nowhere.invalid: there is no such machine")


def test_a_closed_port(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    bed.stop_sshd(bed.hosts[0])
    is_refused(launched(bed, tmp_path), tmp_path, bed, "h0: nothing listens there", "Connection refused")


def test_a_host_key_that_is_not_known_is_not_taken(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    (bed.folder / "known_hosts").write_text("")
    is_refused(launched(bed, tmp_path), tmp_path, bed, "h0: its host key is not known here", "accept-new")
    assert (bed.folder / "known_hosts").read_text() == ""


def test_a_host_key_that_has_changed(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    make_key(tmp_path / "other")
    (bed.folder / "known_hosts").write_text(f"h0 {(tmp_path / 'other.pub').read_text()}")
    is_refused(
        launched(bed, tmp_path), tmp_path, bed, "h0: its host key is another one than before", "ssh-keygen -R h0"
    )


def test_no_interpreter(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    bed.write_profile(python="/opt/none/bin/python")
    is_refused(
        launched(bed, tmp_path), tmp_path, bed, "h0: /opt/none/bin/python cannot be run there: there is no such program"
    )


def test_an_interpreter_without_torch(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    subprocess.run(["python3", "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    bed.write_profile(python=python)
    is_refused(launched(bed, tmp_path), tmp_path, bed, "h0: torch, numpy, xxhash", f"not installed for {python}")


def test_a_folder_that_cannot_be_written(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    bed.on(bed.hosts[0], "sh", "-ec", 'mkdir -p "$0"; mount -t tmpfs -o ro tmpfs "$0"', str(tmp_path / "elsewhere"))
    done = launched(bed, tmp_path, "--runs-dir", str(tmp_path / "elsewhere"))
    is_refused(done, tmp_path, bed, "h0: the run directory cannot be made there", "cannot be written")


def test_all_hosts_are_told_of_at_once(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(2)
    bed.stop_sshd(bed.hosts[0])
    bed.write_profile(hosts=["h0", "h1"], python="/opt/none/bin/python")
    done = launched(bed, tmp_path, nodes=2)
    is_refused(done, tmp_path, bed, "h0: nothing listens there", "h1: /opt/none/bin/python cannot be run there")


def test_more_nodes_than_hosts(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(1)
    done = launched(bed, tmp_path, nodes=2)
    assert done.returncode == 2
    assert "2 nodes, and ssh.hosts has 1 host" in done.stderr


def test_no_host_at_all(recipe: Recipe, make_ssh_bed: MakeSshBed) -> None:
    bed = make_ssh_bed(1)
    done = bed.call(str(recipe("")), "--on", "ssh")
    assert done.returncode == 2
    assert "ssh.hosts: there is none" in done.stderr
