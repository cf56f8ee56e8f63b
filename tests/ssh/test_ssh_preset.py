"""A provider's script on hosts: found by the probe, said in the dry run, read by each node, seen by the workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import Host
from ssh_hosts import MakeSshBed, SshBed

from launcher.planning.host_script import GIB_SCRIPT

pytestmark = [pytest.mark.process, pytest.mark.needs("ssh"), pytest.mark.timeout(240)]

TELLS = """
import json, os, pathlib
names = ("NCCL_NET", "NCCL_IB_TC", "NCCL_DEBUG", "LD_LIBRARY_PATH", "GLOO_SOCKET_IFNAME")
told = {name: os.environ.get(name, "") for name in names}
path = pathlib.Path(os.environ["LAUNCH_RUN_DIR"]) / f"told-{os.environ['RANK']}.json"
path.write_text(json.dumps(told))
"""
SCRIPT = 'false\n[ -n "$NOT_SET_ANYWHERE" ]\nexport NCCL_NET=gIB NCCL_IB_TC=52 NCCL_DEBUG=WARN\n'


def bring(bed: SshBed, host: Host, folder: Path) -> None:
    """Google's folder, on top of the machine's own and on that host alone."""
    upper, work = folder / f"{host.name}-upper", folder / f"{host.name}-work"
    work.mkdir()
    file = upper / Path(GIB_SCRIPT).relative_to("/usr/local")
    file.parent.mkdir(parents=True)
    file.write_text(SCRIPT)
    options = f"lowerdir=/usr/local,upperdir={upper},workdir={work}"
    bed.on(host, "mount", "-t", "overlay", "-o", options, "overlay", "/usr/local")


def test_what_both_hosts_bring_is_taken_and_the_recipe_beats_it(make_ssh_bed: MakeSshBed, tmp_path: Path) -> None:
    bed = make_ssh_bed(2)
    script = tmp_path / "work" / "train.py"
    script.parent.mkdir()
    script.write_text(TELLS)
    recipe = tmp_path / "work" / "gib.yaml"
    recipe.write_text(json.dumps({"name": "gib", "script": "train.py", "resources": {"nodes": 2, "nproc_per_node": 1}}))
    launch = (str(recipe), "--on", str(bed.profile), "--runs-dir", str(tmp_path / "runs"), "network.nccl.IB_TC=106")

    bring(bed, bed.hosts[0], tmp_path)
    shown = bed.call(*launch, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert "network.preset ethernet auto: no InfiniBand, RoCE or EFA on all 2 nodes" in words, "one is not enough"

    bring(bed, bed.hosts[1], tmp_path)
    shown = bed.call(*launch, "--dry-run")
    assert f"auto: {GIB_SCRIPT} is there on all 2 nodes" in shown.stdout
    assert f"script={GIB_SCRIPT}; " in shown.stdout
    done = bed.call(*launch)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    for rank in (0, 1):
        told = json.loads((run / f"told-{rank}.json").read_text())
        assert (told["NCCL_NET"], told["NCCL_IB_TC"], told["NCCL_DEBUG"]) == ("gIB", "106", "WARN")
        assert told["LD_LIBRARY_PATH"].split(":")[0] == "/usr/local/gib/lib64"
        assert told["GLOO_SOCKET_IFNAME"] == "eth0"
