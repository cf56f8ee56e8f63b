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
