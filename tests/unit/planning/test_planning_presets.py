"""Which preset fits what hosts have, what it sets, and what a container needs for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from planning_values import env, facts, job, origins, plan

from launcher.errors import RecipeError
from launcher.planning.host_facts import FabricPort, HostFacts, HostGpu, HostInterface
from launcher.planning.presets import PRESETS, container_needs, missing_for, preset_values
from launcher.recipe.schema import NetworkSection

GIB = "/usr/local/gib/scripts/set_nccl_env.sh"
TCPXO = "/var/lib/tcpxo/lib64/nccl-env-profile.sh"


def port(device: str = "mlx5_0", *, layer: str = "InfiniBand", driver: str = "mlx5_core", state: str = "ACTIVE") -> Any:
    return FabricPort(device=device, port=1, state=state, link_layer=layer, rate_gbps=400.0, driver=driver)


EFA = port("rdmap0", layer="Unspecified", driver="efa")


def host(number: int = 1, *, ports: tuple[FabricPort, ...] = (), paths: tuple[str, ...] = (), **more: Any) -> HostFacts:
    eth0 = HostInterface(name="eth0", addresses=(f"10.0.0.{number}",), mtu=1500)
    verbs = ("/dev/infiniband",) if ports else ()
    return HostFacts(hostname=f"h{number}", interfaces=(eth0,), ports=ports, paths=(*verbs, *paths), **more)


def made(*hosts: HostFacts, **network: Any) -> Any:
    recipe = job(network=network, resources={"nodes": 2})
    return plan(recipe, facts(hosts=hosts), executor="slurm")  # nodes on machines of their own


def shown(of: Any) -> tuple[str, str]:
    return next((str(value.value), value.origin) for value in of.values if value.key == "network.preset")


@pytest.mark.parametrize(
    ("both", "preset", "why"),
    [
        ({}, "ethernet", "no InfiniBand, RoCE or EFA on all 2 nodes"),
        ({"ports": (port(), port("mlx5_1"))}, "infiniband", "2 ports of InfiniBand at 400 Gb/s (mlx5_0 ...)"),
        ({"ports": (port(layer="Ethernet"),)}, "roce", "1 port of RoCE at 400 Gb/s (mlx5_0)"),
        ({"ports": (EFA,)}, "aws-efa", "1 port of EFA"),
        ({"paths": (GIB,), "ports": (port(layer="Ethernet"),)}, "gcp-gib", f"{GIB} is there on all 2 nodes"),
        ({"paths": (TCPXO,)}, "gcp-tcpxo", f"{TCPXO} is there"),
        (
            {"ports": (port(),), "paths": ("/etc/nccl.conf", "/opt/microsoft"), "nccl_conf": ("A=1",)},
            "azure-nd",
            "/etc/nccl.conf and 1 port",
        ),
        ({"ports": (port(state="DOWN"),)}, "ethernet", "no InfiniBand"),
    ],
)
def test_auto_takes_what_all_hosts_have(both: dict[str, Any], preset: str, why: str) -> None:
    of = made(host(1, **both), host(2, **both))
    found, origin = shown(of)
    assert found == preset
    assert origin.startswith(f"auto: {why}")
    assert [name for name in env(of) if name.startswith(("NCCL_", "FI_"))] == [], "NCCL finds the rest by itself"


def test_one_host_without_infiniband_puts_all_on_ethernet_and_it_is_said() -> None:
    of = made(host(1, ports=(port(),)), host(2))
    assert shown(of)[0] == "ethernet"
    assert env(of)["NCCL_IB_DISABLE"] == "1"
    assert "node 0 (h1) has 1 port of InfiniBand" in origins(of)["NCCL_IB_DISABLE"]
    assert any(note.startswith("NCCL goes over ethernet") and "node 1 (h2) has none" in note for note in of.notes)


def test_the_environment_beats_a_preset_and_the_recipe_beats_both() -> None:
    recipe = job(network={"preset": "oci-roce", "nccl": {"IB_TC": 106}}, resources={"nodes": 2})
    hosts = tuple(host(number, ports=(port(layer="Ethernet"),)) for number in (1, 2))
    environment = {"NCCL_IB_TC": "5", "NCCL_IB_GID_INDEX": "1"}
    of = plan(recipe, facts(hosts=hosts, environment=environment), executor="slurm")
    assert (env(of)["NCCL_IB_TC"], env(of)["NCCL_IB_GID_INDEX"], env(of)["NCCL_IB_HCA"]) == ("106", "1", "mlx5")
    assert origins(of)["NCCL_IB_HCA"] == "preset oci-roce"


def test_libfabric_is_a_users_choice_too() -> None:
    recipe = job(network={"preset": "aws-efa"}, resources={"nodes": 2})
    assert env(plan(recipe, facts(), executor="slurm"))["FI_PROVIDER"] == "efa"
    given = facts(environment={"FI_PROVIDER": "tcp"})
    assert env(plan(recipe, given, executor="slurm"))["FI_PROVIDER"] == "tcp"
    recipe = job(network={"preset": "aws-efa"}, resources={"nodes": 2}, env={"FI_PROVIDER": "sockets"})
    assert env(plan(recipe, given, executor="slurm"))["FI_PROVIDER"] == "sockets"


def test_values_for_one_kind_of_gpu() -> None:
    h100 = host(gpus=(HostGpu(index=0, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, driver="550"),))
    assert "NCCL_CUMEM_ENABLE" in [known.name for known in preset_values("oci-roce", (h100,))]
    assert "NCCL_CUMEM_ENABLE" not in [known.name for known in preset_values("oci-roce", (host(),))]


def test_a_named_preset_that_a_host_cannot_have_is_a_problem() -> None:
    with pytest.raises(RecipeError) as caught:
        made(host(1, paths=(GIB,), ports=(port(),)), host(2), preset="gcp-gib")
    assert [problem.message for problem in caught.value.problems] == [
        f"network.preset: gcp-gib: node 1 (h2) has no {GIB}",
        "network.preset: gcp-gib: node 1 (h2) has no /dev/infiniband",
    ]


def test_an_interface_that_a_host_does_not_have_is_a_problem() -> None:
    with pytest.raises(RecipeError) as caught:
        made(host(1), host(2), interface="ib0")
    first, second = caught.value.problems
    assert "'ib0' does not exist (or is down) on node 0 (h1)" in first.message
    assert second.hint == "interfaces with an address: eth0 (10.0.0.2)"


def test_a_script_of_the_host_is_run_by_bash_before_the_users_setup() -> None:
    recipe = job(network={"preset": "gcp-gib"}, resources={"nodes": 2}, setup=["module load cuda"])
    of = plan(recipe, facts(), executor="slurm")
    assert len(of.setup) == 2
    assert f"script={GIB};" in of.setup[0]
    assert of.setup[1] == "module load cuda"
    assert plan(job(network={"preset": "gcp-gib"}), facts()).setup == (), "on one machine nothing goes over the fabric"


def bash(line: str) -> subprocess.CompletedProcess[str]:
    """As the agent runs `setup`."""
    script = f'{line}\necho "$NCCL_NET $LD_LIBRARY_PATH"'
    clean = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=False, env=clean
    )


def test_sourcing_forgives_what_providers_write_and_does_not_forgive_a_missing_script(tmp_path: Path) -> None:
    script = tmp_path / "set_nccl_env.sh"
    (line,) = PRESETS["gcp-gib"].setup
    done = bash(line.replace(GIB, str(script)))
    assert done.returncode == 1
    assert "network.preset gcp-gib: there is no" in done.stderr
    script.write_text('false\n[ -n "$NOT_SET_ANYWHERE" ]\nexport NCCL_NET=gIB\n')
    done = bash(line.replace(GIB, str(script)))
    assert (done.returncode, done.stdout.split()) == (0, ["gIB", "/usr/local/gib/lib64"])


@pytest.mark.parametrize("name", ["gcp-gib", "gcp-tcpxo", "gcp-tcpx"])
def test_lines_of_bash_are_sound(name: str, tmp_path: Path) -> None:
    file = tmp_path / "setup.sh"
    file.write_text("#!/bin/bash\n" + "\n".join(PRESETS[name].setup) + "\n")
    # SC1090: what is sourced is not here; SC2154: what it sets
    done = subprocess.run(
        [str(Path(sys.executable).with_name("shellcheck")), "-e", "SC1090,SC1091,SC2154,SC2097,SC2098", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""


def test_what_containers_need() -> None:
    plain = host()
    assert container_needs("auto", plain) == ((), (), (), ())
    assert container_needs("infiniband", plain).devices == (), "a device that is not there ends `docker run`"
    infiniband = host(ports=(port(),), paths=("/etc/nccl.conf", "/opt/microsoft"))
    needs = container_needs("auto", infiniband)
    assert needs.mounts == ("/etc/nccl.conf:/etc/nccl.conf:ro", "/opt/microsoft:/opt/microsoft:ro")
    assert (needs.devices, needs.caps) == (("/dev/infiniband",), ("IPC_LOCK",))
    gib = container_needs("gcp-gib", host(paths=(GIB,), ports=(port(layer="Ethernet"),)))
    assert gib.mounts == ("/usr/local/gib:/usr/local/gib:ro",)
    assert gib.source_scripts == PRESETS["gcp-gib"].setup
    tcpx = container_needs("gcp-tcpx", host(paths=("/run/tcpx", "/var/lib/tcpx/lib64")))
    assert tcpx.mounts == ("/run/tcpx:/run/tcpx", "/var/lib/tcpx/lib64:/usr/local/tcpx/lib64:ro")
    assert container_needs("ethernet", infiniband).devices == ()


def test_each_value_has_a_source_and_a_date_and_each_preset_is_in_the_schema() -> None:
    for preset in PRESETS.values():
        assert all(known.source and known.read.startswith("20") for known in preset.values)
    annotation = NetworkSection.model_fields["preset"].annotation
    assert set(get_args(annotation)) == set(PRESETS)
    assert missing_for("auto", (host(),)) == []


def test_the_page_of_the_network_names_each_preset_and_what_it_sets() -> None:
    page = (Path(__file__).parents[3] / "docs" / "network.md").read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        assert f"`{name}`" in page or name == "auto"
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")] or [""]
        for known in preset.values if name in ("ethernet", "infiniband", "roce", "aws-efa", "coreweave") else ():
            assert f"{known.name}={known.value}" in row
