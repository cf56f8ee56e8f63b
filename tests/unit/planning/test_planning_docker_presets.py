"""What a host brings for its network is in the lines of `docker run`, where the host has it."""

from __future__ import annotations

from planning_values import facts, job, plan

from launcher.planning.docker_facts import DockerFacts
from launcher.planning.host_facts import FabricPort, HostFacts
from launcher.planning.interpreters import Interpreter
from launcher.planning.plan import Plan

PORT = FabricPort(device="mlx5_0", port=1, state="ACTIVE", link_layer="InfiniBand", rate_gbps=400.0, driver="mlx5_core")
IMAGE = DockerFacts(
    image="launcher:cpu",
    version="26.1.5",
    has_image=True,
    interpreter=Interpreter(path="python3", version="3.11.2", torch_version="2.13.0"),
    packages={"torch": "2.13.0", "numpy": "2", "xxhash": "3", "pydantic": "2"},
    uid=7,
    gid=7,
    free_port=29400,
)


def made(host: HostFacts, **network: object) -> Plan:
    return plan(job(network=network), facts(docker=(IMAGE,), hosts=(host,)), executor="docker")


def line(of: Plan) -> str:
    assert of.hosts is not None
    return " ".join(of.hosts.nodes[0].start)


def test_a_plain_host_brings_nothing() -> None:
    text = line(made(HostFacts(hostname="h0")))
    assert "--device" not in text
    assert "nccl.conf" not in text


def test_infiniband_and_the_hosts_own_configuration_of_nccl() -> None:
    host = HostFacts(hostname="h0", ports=(PORT,), paths=("/dev/infiniband", "/etc/nccl.conf", "/opt/microsoft"))
    text = line(made(host, preset="infiniband"))
    assert "--device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1" in text
    assert "--mount type=bind,source=/etc/nccl.conf,target=/etc/nccl.conf,readonly" in text
    assert "--mount type=bind,source=/opt/microsoft,target=/opt/microsoft,readonly" in text


def test_an_interface_of_a_container_is_not_looked_for_on_the_host() -> None:
    of = plan(
        job(network={"interface": "eth0"}, resources={"nodes": 2}),
        facts(docker=(IMAGE,), hosts=(HostFacts(hostname="h0"),)),
        executor="docker",
    )
    assert of.interface == "eth0"


def test_one_machine_with_nvlink_says_so_and_sets_nothing_for_it() -> None:
    nvlinks = ("\tGPU0\tGPU1", "GPU0\t X \tNV18", "GPU1\tNV18\t X ")
    for topology, why in (
        (nvlinks, "auto: one machine, whose GPUs are joined by NVLink (NV18)"),
        (tuple(line.replace("NV18", "SYS") for line in nvlinks), "auto: one machine, whose GPUs are joined by SYS"),
        ((), "auto"),
    ):
        of = made(HostFacts(hostname="h0", topology=topology))
        (shown,) = [value for value in of.values if value.key == "network.preset"]
        assert shown.value == "loopback"
        assert shown.origin.startswith(why)
        assert not [each for each in of.env if each.name.startswith("NCCL_P2P")]
