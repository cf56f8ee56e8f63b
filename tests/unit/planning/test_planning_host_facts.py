"""The probe runs for real, in the shell that is here, on made folders and with made programs; what it says is read."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.planning.host_facts import HostFacts, gpu_links, host_facts, host_from_json
from launcher.planning.host_script import probe_argv

Files = dict[str, str]
SMI = """#!/bin/sh
case "$*" in
    *memory.total*) for i in 0 1; do echo "$i, NVIDIA H100 80GB HBM3, 81559, 550.90.07"; done;;
    *ecc.errors*) printf '0, 0, 0x0000000000000004, 600.00, 700.00, 41, 5, 16, 16\\n'
        printf '1, 3, [N/A], 700.00, 700.00, 41, 5, 8, 16\\n';;
    topo*) printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n';;
    *) echo '| NVIDIA-SMI 550.90.07    Driver Version: 550.90.07    CUDA Version: 12.4     |';;
esac
"""


def write(root: Path, files: Files) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def port(
    device: str, *, state: str = "4: ACTIVE", layer: str = "InfiniBand", rate: str = "400 Gb/sec (4X NDR)"
) -> Files:
    folder = f"sys/class/infiniband/{device}/ports/1"
    return {f"{folder}/state": f"{state}\n", f"{folder}/link_layer": f"{layer}\n", f"{folder}/rate": f"{rate}\n"}


def asked(root: Path, *folders: str, programs: Files | None = None, only: tuple[str, ...] = ()) -> HostFacts:
    """only: the programs that there are."""
    bin_ = root / "bin"
    bin_.mkdir()
    for name in only:
        (bin_ / name).symlink_to(shutil.which(name) or "")
    for name, text in (programs or {}).items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    env = {**os.environ, "PATH": str(bin_) if only else f"{bin_}:/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(probe_argv(folders, root=str(root)), capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return host_facts(done.stdout)


def test_a_machine_without_anything(tmp_path: Path) -> None:
    found = asked(tmp_path)
    assert (found.ports, found.paths, found.nccl_conf, found.gpus, found.vendor) == ((), (), (), (), "")
    assert found.hostname == os.uname().nodename
    assert found.shm is not None
    assert found.clock_s is not None
    assert found.cpus >= 1


def test_fabric_and_what_a_provider_brings(tmp_path: Path) -> None:
    write(tmp_path, {**port("mlx5_0"), **port("mlx5_1", state="1: DOWN"), **port("mlx5_2", layer="Ethernet")})
    write(tmp_path, port("rdmap0", layer="Unspecified", rate="100 Gb/sec"))
    driver = tmp_path / "sys/class/infiniband/rdmap0/device"
    driver.mkdir()
    (driver / "driver").symlink_to("../../bus/pci/drivers/efa")
    write(tmp_path, {"dev/infiniband/uverbs0": "", "opt/microsoft/ndv5/topo.xml": ""})
    write(tmp_path, {"etc/nccl.conf": "# of the image\nNCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml"})
    write(tmp_path, {"sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n"})
    found = asked(tmp_path)
    assert [(each.device, each.kind, each.is_active, each.rate_gbps) for each in found.ports] == [
        ("mlx5_0", "infiniband", True, 400.0),
        ("mlx5_1", "infiniband", False, 400.0),
        ("mlx5_2", "roce", True, 400.0),
        ("rdmap0", "efa", True, 100.0),
    ]
    assert found.paths == ("/dev/infiniband", "/etc/nccl.conf", "/opt/microsoft")
    assert found.nccl_conf == ("NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml",)
    assert found.vendor == "Microsoft Corporation"


def test_interfaces_with_what_their_links_can(tmp_path: Path) -> None:
    for name, mtu, speed, state in (("eth0", "9000", "25000", "up"), ("eth1", "1500", "-1", "down")):
        folder = f"sys/class/net/{name}"
        write(tmp_path, {f"{folder}/mtu": mtu, f"{folder}/speed": speed, f"{folder}/operstate": state})
    addresses = "1: lo    inet 127.0.0.1/8 scope host lo\n2: eth0@if7    inet 10.0.0.5/24 scope global eth0\n"
    links = "1: lo: <LOOPBACK,UP> mtu 65536 qdisc noqueue\n2: eth0@if7: <BROADCAST,UP> mtu 1450 qdisc noqueue\n"
    said = f"printf '%s' '{addresses}2: eth0    inet6 fe80::1/64 scope link\n'"
    ip = f"#!/bin/sh\ncase $* in *link*) printf '%s' '{links}';; *) {said};; esac\n"
    (tmp_path / "with").mkdir()
    (tmp_path / "sys").rename(tmp_path / "with" / "sys")
    lo, eth0 = asked(tmp_path / "with", programs={"ip": ip}).interfaces
    assert (lo.name, lo.addresses, lo.is_virtual) == ("lo", ("127.0.0.1",), True)
    assert (eth0.name, eth0.addresses, eth0.mtu, eth0.speed_mbps) == ("eth0", ("10.0.0.5",), 1450, 25000)


def test_without_ip_there_are_interfaces_and_no_addresses(tmp_path: Path) -> None:
    for name, mtu, speed, state in (("eth0", "9000", "25000", "up"), ("eth1", "1500", "-1", "down")):
        folder = f"sys/class/net/{name}"
        write(tmp_path, {f"{folder}/mtu": mtu, f"{folder}/speed": speed, f"{folder}/operstate": state})
    found = asked(tmp_path, only=("sh", "uname", "cat", "date", "df", "readlink", "nproc"))
    assert not found.knows_addresses
    assert [(each.name, each.addresses, each.mtu) for each in found.interfaces] == [("eth0", (), 9000)]


def test_gpus_and_their_health(tmp_path: Path) -> None:
    found = asked(tmp_path, programs={"nvidia-smi": SMI})
    first, second = found.gpus
    assert (first.name, first.driver, first.memory_bytes) == ("NVIDIA H100 80GB HBM3", "550.90.07", 81559 << 20)
    assert (first.ecc_uncorrected, first.throttle_reasons, first.power_limit_w) == (0, 4, 600.0)
    assert (second.ecc_uncorrected, second.throttle_reasons, second.pcie_width) == (3, None, 8)
    assert found.cuda == "12.4"
    assert gpu_links(found.topology) == {(0, 1): "NV18"}


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("#!/bin/sh\nexit 124\n", "nvidia-smi does not answer"),
        ("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n", "nvidia-smi: NVIDIA-SMI has failed"),
    ],
)
def test_a_driver_that_does_not_do(tmp_path: Path, program: str, fault: str) -> None:
    found = asked(tmp_path, programs={"nvidia-smi": program})
    assert (found.gpus, found.gpu_fault) == ((), fault)


def test_docker_that_answers_and_one_that_does_not(tmp_path: Path) -> None:
    up, down = tmp_path / "up", tmp_path / "down"
    up.mkdir()
    down.mkdir()
    found = asked(up, programs={"docker": "#!/bin/sh\necho '26.1.5 io.containerd.runc.v2,nvidia,runc,'\n"})
    assert (found.docker, found.docker_runtimes) == ("26.1.5", ("io.containerd.runc.v2", "nvidia", "runc"))
    program = "#!/bin/sh\necho; echo 'Cannot connect to the Docker daemon' >&2; exit 1\n"
    found = asked(down, programs={"docker": program})
    assert (found.docker, found.docker_fault) == ("", "Cannot connect to the Docker daemon")


def test_slurm_quota_and_the_own_name(tmp_path: Path) -> None:
    write(tmp_path, {"etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n"})
    sinfo = "#!/bin/sh\n[ \"$1\" = --version ] && { echo slurm 24.05.1; exit; }\necho 'Unable to contact'; exit 1\n"
    quota = "#!/bin/sh\necho 'Disk quotas for user ada (uid 7):'\necho '/dev/vda1 10240* 10000 20000 6days 5 0 0'\n"
    found = asked(tmp_path, programs={"sinfo": sinfo, "quota": quota})
    assert (found.slurm, found.slurm_fault) == ("24.05.1", "Unable to contact")
    assert found.quota == ("/dev/vda1 10240* 10000 20000 6days 5 0 0",)
    assert found.own_name_address == "127.0.1.1"


def test_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    wanted = str(tmp_path / "a b" / "runs")
    space = asked(tmp_path, wanted).spaces[-1]
    assert (space.path, space.is_writable) == (wanted, True)
    assert 0 < space.free_bytes <= space.total_bytes


def test_a_greeting_of_the_shell_is_no_answer_and_a_broken_one_is_said() -> None:
    with pytest.raises(ValueError, match="the last it said: sh: not found"):
        host_facts("Welcome to Ubuntu\nlaunch-host begin 1\nsh: not found\n")
    assert host_facts("Welcome\nlaunch-host begin 1\nlaunch-host hostname h1\nlaunch-host end\n").hostname == "h1"


def test_json_reads_back(tmp_path: Path) -> None:
    write(tmp_path, port("mlx5_0"))
    found = asked(tmp_path, programs={"nvidia-smi": SMI})
    assert host_from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_the_script_is_plain_sh(tmp_path: Path) -> None:
    script = tmp_path / "probe.sh"
    script.write_text("#!/bin/sh\n" + probe_argv()[2])
    # SC3045: `ulimit -l`, which every shell has
    done = subprocess.run(
        [str(Path(sys.executable).with_name("shellcheck")), "-S", "warning", "-e", "SC3045", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
