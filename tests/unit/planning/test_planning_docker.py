"""The line of `docker run` of each node: what is in it, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planning_values import facts, job, plan, script

from launcher.errors import RecipeError, Refused
from launcher.planning.docker import read_mount, size_bytes
from launcher.planning.docker_facts import DockerFacts
from launcher.planning.facts import Facts, facts_from_json, facts_to_json
from launcher.planning.host_facts import HostFacts
from launcher.planning.interpreters import Interpreter
from launcher.planning.plan import Mount, Plan
from launcher.planning.ssh_facts import SshHost

PACKAGES = {"torch": "2.13.0", "numpy": "2.0", "xxhash": "3.5", "pydantic": "2.9"}


def on_docker(*, gpus: int = 0, **docker: Any) -> Facts:
    values: dict[str, Any] = {
        "image": "lab:1",
        "version": "26.1.5",
        "memory_bytes": 64 << 30,
        "has_image": True,
        "interpreter": Interpreter(path="python3", version="3.12.4", torch_version="2.13.0"),
        "packages": PACKAGES,
        "uid": 1000,
        "gid": 1000,
        "free_port": 23_456,
    }
    return facts(gpus=gpus, docker=(DockerFacts(**{**values, **docker}),))


def made(recipe: Any, on: Facts | None = None) -> Plan:
    return plan(recipe, on or on_docker(), executor="docker")


def line(of: Plan, node: int = 0) -> list[str]:
    assert of.hosts is not None
    return list(of.hosts.nodes[node].start)


def after(words: list[str], flag: str) -> list[str]:
    """The values of a flag."""
    return [words[index + 1] for index, word in enumerate(words) if word == flag]


def test_a_plan_with_containers_reads_back_to_an_equal_one() -> None:
    of = made(job(resources={"nodes": 2}, docker={"image": "lab:1"}))
    assert Plan.from_json(of.to_json()) == of
    on = on_docker(gpus=2, entrypoint=("tini",), devices=("/dev/infiniband",))
    assert facts_from_json(facts_to_json(on)) == on


def test_several_nodes_have_a_network_of_their_own_and_one_has_none() -> None:
    of = made(job(resources={"nodes": 2}))
    assert of.hosts is not None
    assert of.hosts.before == (("docker", "network", "create", "--label", "launcher.run=r0", "launch-r0"),)
    assert of.hosts.after == (("docker", "network", "rm", "launch-r0"),)
    assert (of.hosts.head_address, of.hosts.head_port) == ("node-0", 29400)
    assert after(line(of, 1), "--network-alias") == ["node-1"]
    one = made(job())
    assert one.hosts is not None
    assert (one.hosts.before, one.hosts.after, one.hosts.head_address) == ((), (), "127.0.0.1")
    assert after(line(one), "--network") == ["bridge"]


def test_on_the_network_of_the_machine_the_port_is_one_that_was_free() -> None:
    of = made(job(docker={"network": "host"}))
    assert line(of)[-1] == "127.0.0.1:23456"
    assert "--hostname" not in line(of)


def test_each_container_has_the_gpus_of_its_node_and_numbers_them_from_0() -> None:
    of = made(job(resources={"nodes": 2}), on_docker(gpus=4))
    assert after(line(of, 0), "--gpus") == ['"device=0,1"']
    assert after(line(of, 1), "--gpus") == ['"device=2,3"']
    assert [node.gpus for node in of.nodes] == [(0, 1), (0, 1)]
    assert after(line(of), "--ulimit") == ["memlock=-1", "stack=67108864"]
    assert "--ulimit" not in line(made(job()))


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ("auto", ["--shm-size", str(8 << 30)]),
        ("host", ["--ipc", "host"]),
        ("64MiB", ["--shm-size", str(64 << 20)]),
    ],
)
def test_shared_memory_is_a_size_or_that_of_the_machine_never_both(asked: str, flags: list[str]) -> None:
    words = line(made(job(resources={"nodes": 2}, docker={"shm_size": asked})))
    assert [word for word in words if word in ("--shm-size", "--ipc")] == flags[:1]
    assert after(words, flags[0]) == flags[1:]


def test_who_owns_the_files() -> None:
    assert after(line(made(job())), "--user") == ["1000:1000"]
    assert after(line(made(job(), on_docker(rootless=True))), "--user") == [], "root inside is the user outside"
    assert after(line(made(job(docker={"user": "image"}))), "--user") == []
    assert after(line(made(job(docker={"user": "7:8"}))), "--user") == ["7:8"]


def test_an_image_that_has_an_init_gets_no_second_one() -> None:
    with_init = line(made(job(), on_docker(entrypoint=("/usr/bin/tini", "-g", "--"))))
    assert (after(with_init, "--entrypoint"), with_init.count("--init")) == ([""], 1)
    assert "--entrypoint" not in line(made(job(), on_docker(entrypoint=("/opt/nvidia/nvidia_entrypoint.sh",))))


def test_devices_of_a_fast_network_only_where_they_are() -> None:
    words = line(made(job(), on_docker(devices=("/dev/infiniband",))))
    assert (after(words, "--device"), after(words, "--cap-add")) == (["/dev/infiniband"], ["IPC_LOCK"])
    assert "--device" not in line(made(job()))


def test_the_stop_of_docker_comes_after_that_of_the_agents() -> None:
    of = made(job(faults={"grace": "90s"}))
    assert of.hosts is not None
    assert after(line(of), "--stop-timeout") == ["100"]
    assert of.hosts.nodes[0].stop == ("docker", "stop", "-t", "100", "r0-node-0")


def test_no_value_of_a_secret_and_no_variable_but_ours_is_in_the_line() -> None:
    of = made(script(secrets=["HF_TOKEN"]))
    names = [value.partition("=")[0] for value in after(line(of), "--env")]
    assert names == ["HOME", "USER", "LAUNCH_RUN_ID", "LAUNCH_SECRETS_FILE"]
    assert of.secrets == ("HF_TOKEN", "WANDB_API_KEY")


def test_an_image_that_is_not_there_is_fetched_first_unless_it_is_ours() -> None:
    absent = on_docker(has_image=False, interpreter=None, packages=None)
    of = made(job(docker={"image": "lab:1"}), absent)
    assert of.hosts is not None
    assert of.hosts.before == (("docker", "pull", "--quiet", "lab:1"),)
    ours = made(job(), absent)
    assert ours.hosts is not None
    assert ours.hosts.before == ()


def test_an_image_without_what_the_workers_need_is_refused_once() -> None:
    bare = on_docker(packages={}, interpreter=Interpreter(path="python3", version="3.12.4"))
    with pytest.raises(Refused) as caught:
        made(job(), bare)
    lacks = "the image lab:1 has no torch, numpy, xxhash, pydantic, which the built-in training program imports"
    assert [problem.message for problem in caught.value.problems] == [f"docker.image: {lacks}"]
    with pytest.raises(Refused, match="the image lab:1 has no torch, which the workers need"):
        made(script(), bare)
    broken = on_docker(packages=None, interpreter=None, fault="python3 in it: exit code 127")
    with pytest.raises(Refused, match="lab:1 cannot be used: python3 in it: exit code 127"):
        made(job(), broken)


def on_hosts(*names: str) -> Facts:
    """Two nodes' worth of hosts, each with an engine; the first one's address is known."""
    one = on_docker().docker[0]
    engines = tuple(dataclasses.replace(one, machine=name, uid=7, free_port=24_000) for name in names)
    seen = HostFacts(hostname="h", interfaces=())
    hosts = tuple(
        SshHost(destination=name, facts=seen, address=f"10.0.0.{index}", python="python3", has_workdir=True)
        for index, name in enumerate(names)
    )
    return dataclasses.replace(on_docker(), docker=engines, ssh=hosts)


def test_on_hosts_each_container_is_on_the_network_of_its_machine() -> None:
    recipe = job(resources={"nodes": 2}, docker={"hosts": ["a", "b"]}, checkpoint={"store": "replicate"})
    of = made(recipe, on_hosts("a", "b"))
    assert of.hosts is not None
    assert [node.machine for node in of.hosts.nodes] == ["a", "b"]
    assert (of.hosts.head_address, of.hosts.head_port, of.hosts.shared) == ("10.0.0.0", 24_000, False)
    assert after(line(of, 1), "--network") == ["host"]
    assert after(line(of, 1), "--user") == ["7:1000"]
    assert (of.hosts.before, of.hosts.network) == ((), "")


def test_more_nodes_than_hosts_and_a_network_that_ends_at_its_machine_are_mistakes() -> None:
    recipe = job(resources={"nodes": 3}, docker={"hosts": ["a", "b"], "network": "mine"})
    with pytest.raises(RecipeError) as caught:
        made(recipe, on_hosts("a", "b"))
    said = [problem.message for problem in caught.value.problems]
    assert "resources.nodes: 3 nodes, and docker.hosts has 2 hosts" in said
    assert "docker.network: mine ends at its machine, and the nodes are on several" in said


def test_a_workdir_that_is_the_whole_disk_is_a_mistake() -> None:
    on = dataclasses.replace(on_docker(), cwd="/")
    with pytest.raises(RecipeError, match="the whole disk"):
        made(job(), on)


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/data", Mount(source="/data", target="/data", read_only=False)),
        ("/data:ro", Mount(source="/data", target="/data")),
        ("sets:/data:ro", Mount(source="/home/ada/sets", target="/data")),
        ("/a:/b:rw", Mount(source="/a", target="/b", read_only=False)),
        ("/a:b", None),
        ("/a:/b:/c", None),
        (":", None),
    ],
)
def test_mounts_as_people_write_them(text: str, mount: Mount | None) -> None:
    assert read_mount(text, "/home/ada") == mount


def test_a_path_with_a_comma_stays_one_value() -> None:
    words = line(made(job(docker={"mounts": ["/a,b:/c:ro"]})))
    assert 'type=bind,"source=/a,b",target=/c,readonly' in after(words, "--mount")


@pytest.mark.parametrize(
    ("text", "size"), [("64m", 64 << 20), ("1.5GiB", 3 << 29), ("16 GB", 16 << 30), ("4096", 4096)]
)
def test_sizes_are_powers_of_1024_as_for_docker(text: str, size: int) -> None:
    assert size_bytes(text) == size
