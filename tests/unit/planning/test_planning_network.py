"""Who wins for each NCCL, gloo and torch variable, and what is said about it."""

from __future__ import annotations

import re

import pytest
from planning_values import ETHERNET, LOOPBACK, env, facts, job, origins, plan, script

from launcher.errors import RecipeError
from launcher.planning.facts import Interface
from launcher.planning.network import Endpoint, Family, current_name, pick_family


def test_recipe_beats_environment_beats_preset_beats_default() -> None:
    network = {"preset": "infiniband", "nccl": {"DEBUG": "INFO"}}
    made = plan(
        job(network=network),
        facts(environment={"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "20", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
    )
    assert (
        env(made).items()
        >= {
            "NCCL_DEBUG": "INFO",
            "NCCL_IB_TIMEOUT": "20",
            "NCCL_IB_RETRY_CNT": "7",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        }.items()
    )
    assert origins(made)["NCCL_DEBUG"] == "recipe:network.nccl.DEBUG"
    assert origins(made)["NCCL_IB_TIMEOUT"] == "environment"
    assert origins(made)["NCCL_IB_RETRY_CNT"] == "preset infiniband"
    assert "NCCL_DEBUG=INFO from recipe:network.nccl.DEBUG; WARN from environment is not used" in made.notes
    assert not any("IB_TIMEOUT" in note for note in made.notes), "a preset that gives way is no conflict"


def test_an_override_is_named_as_the_origin() -> None:
    key, origin = "network.nccl.DEBUG", "override network.nccl.DEBUG=INFO"
    made = plan(job(network={"nccl": {"DEBUG": "INFO"}}), facts(), origins={key: origin})
    assert origins(made)["NCCL_DEBUG"] == origin


def test_equal_values_are_no_conflict() -> None:
    made = plan(job(network={"nccl": {"DEBUG": "WARN"}}), facts(environment={"NCCL_DEBUG": "WARN"}))
    assert not any("NCCL_DEBUG" in note for note in made.notes)


@pytest.mark.parametrize(("value", "text"), [(True, "1"), (False, "0"), (4, "4"), ("Ring", "Ring")])
def test_values_are_written_as_the_libraries_read_them(value: object, text: str) -> None:
    assert env(plan(job(network={"nccl": {"ALGO": value}}), facts()))["NCCL_ALGO"] == text


def test_one_interface_in_the_syntax_of_each_library() -> None:
    """F037."""
    made = plan(job(network={"interface": "eth0"}), facts())
    assert (
        env(made).items()
        >= {
            "NCCL_SOCKET_IFNAME": "=eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
        }.items()
    )


def test_an_explicit_interface_beats_the_environment_and_a_named_variable_beats_both() -> None:
    network = {"interface": "eth0", "gloo": {"SOCKET_IFNAME": "lo"}}
    made = plan(job(network=network), facts(environment={"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth0"}))
    assert env(made)["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert env(made)["GLOO_SOCKET_IFNAME"] == "lo"
    assert any(note.startswith("NCCL_SOCKET_IFNAME==eth0 from") and "eth1" in note for note in made.notes)


def test_auto_leaves_an_interface_of_the_user_alone() -> None:
    made = plan(job(), facts(environment={"GLOO_SOCKET_IFNAME": "eth0"}))
    assert env(made)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert origins(made)["GLOO_SOCKET_IFNAME"] == "environment"


def test_auto_on_one_machine_is_its_loopback_by_its_real_name() -> None:
    """F035."""
    made = plan(job(), facts(interfaces=(ETHERNET, Interface(name="lo0", addresses=("127.0.0.1",), loopback=True))))
    assert (made.interface, env(made)["GLOO_SOCKET_IFNAME"]) == ("lo0", "lo0")


def test_auto_elsewhere_is_left_to_each_node() -> None:
    made = plan(job(), facts(), executor="slurm")
    assert made.interface == "auto"
    assert "GLOO_SOCKET_IFNAME" not in env(made)


@pytest.mark.parametrize(
    ("interfaces", "fault"),
    [
        ((LOOPBACK, ETHERNET), "does not exist"),
        ((LOOPBACK, Interface(name="nope0", addresses=(), loopback=False)), "no address"),
    ],
)
def test_an_interface_that_cannot_work_is_a_problem_that_lists_the_others(
    interfaces: tuple[Interface, ...], fault: str
) -> None:
    """F037."""
    with pytest.raises(RecipeError) as caught:
        plan(job(network={"interface": "nope0"}), facts(interfaces=interfaces))
    (problem,) = caught.value.problems
    assert fault in problem.message
    assert "lovelace" in problem.message
    assert "lo (127.0.0.1, ::1)" in problem.hint


def test_a_wrong_gloo_interface_in_the_environment_is_a_problem() -> None:
    """F035."""
    with pytest.raises(RecipeError, match="GLOO_SOCKET_IFNAME: the interface 'enp3s0' does not exist"):
        plan(job(), facts(environment={"GLOO_SOCKET_IFNAME": "enp3s0"}))


def test_ethernet_skips_bridges_of_containers_and_infiniband_prefers_ib() -> None:
    docker = Interface(name="docker0", addresses=("172.17.0.1",), loopback=False)
    ib = Interface(name="ib0", addresses=("192.168.9.1",), loopback=False)
    here = facts(interfaces=(LOOPBACK, docker, ETHERNET, ib))
    assert plan(job(network={"preset": "ethernet"}), here).interface == "eth0"
    assert plan(job(network={"preset": "infiniband"}), here).interface == "ib0"


def test_a_preset_without_any_interface_is_a_problem() -> None:
    with pytest.raises(RecipeError, match=r"network\.preset: no interface of this machine fits ethernet"):
        plan(job(network={"preset": "ethernet"}), facts(interfaces=(LOOPBACK,)))


def test_auto_never_turns_infiniband_off() -> None:
    assert "NCCL_IB_DISABLE" not in env(plan(job(), facts(), executor="slurm"))


@pytest.mark.parametrize(
    ("torch", "written", "sent"),
    [
        ("2.4.0", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("2.13.0+cpu", "NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
        ("2.13.0", "NCCL_DESYNC_DEBUG", "TORCH_NCCL_DESYNC_DEBUG"),
        ("2.8.0", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("2.13.0", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("2.14.0.dev20261101", "NCCL_ENABLE_TIMING", "TORCH_NCCL_ENABLE_TIMING"),
        (None, "NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
        ("2.13.0", "NCCL_DEBUG", "NCCL_DEBUG"),
    ],
)
def test_renamed_variables_follow_the_torch_version(torch: str | None, written: str, sent: str) -> None:
    """F071."""
    assert current_name(written, torch) == sent
    made = plan(script(), facts(torch_version=torch, environment={written: "7"}))
    assert env(made)[sent] == "7"
    assert origins(made)[sent] == "environment"
    if written == sent:
        assert made.env_unset == ()
        assert not any(written in note for note in made.notes)
    else:
        assert written not in env(made)
        assert made.env_unset == (written,)
        assert sum(written in note for note in made.notes) == 1, "one note, not one per rank"


@pytest.mark.parametrize(
    ("torch", "written", "sent"),
    [
        ("2.1.2", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        ("2.1.2", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
        ("2.2.0", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ],
)
def test_old_torch_reads_the_old_names(torch: str, written: str, sent: str) -> None:
    """F071."""
    assert current_name(written, torch) == sent


def test_both_spellings_the_new_one_wins() -> None:
    """F071."""
    made = plan(job(), facts(environment={"NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}))
    assert env(made)["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert any("NCCL_BLOCKING_WAIT=0 from environment is not used" in note for note in made.notes)


def test_an_old_name_in_the_recipe_is_sent_under_the_new_one() -> None:
    made = plan(job(network={"nccl": {"BLOCKING_WAIT": True}}, env={"NCCL_DESYNC_DEBUG": "1"}), facts())
    assert env(made).items() >= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_DESYNC_DEBUG": "1"}.items()
    assert {"NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"}.isdisjoint(env(made))


def test_an_unknown_name_gets_a_suggestion_and_is_passed_on() -> None:
    made = plan(job(network={"nccl": {"SOKET_NTHREADS": 4}}), facts())
    assert env(made)["NCCL_SOKET_NTHREADS"] == "4"
    assert any("did you mean SOCKET_NTHREADS?" in note for note in made.notes)


def test_a_name_with_its_prefix_is_a_problem() -> None:
    with pytest.raises(RecipeError, match=r"network\.nccl\.NCCL_DEBUG: names stand here without NCCL_"):
        plan(job(network={"nccl": {"NCCL_DEBUG": "INFO"}}), facts())


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("[::1]:29500", "::1", 29500),
        ("::1", "::1", None),
        ("host:1", "host", 1),
        ("host", "host", None),
        ("10.0.0.1:29500", "10.0.0.1", 29500),
        ("fe80::1%eth0", "fe80::1%eth0", None),
        ("[fd12::1]", "fd12::1", None),
    ],
)
def test_endpoints_are_read(text: str, host: str, port: int | None) -> None:
    """F096."""
    endpoint = Endpoint.parse(text)
    assert (endpoint.host, endpoint.port) == (host, port)
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text", ["", ":1", "host:", "host:0", "host:65536", "host:x", "[::1", "[host]:1", "a:b:c", "[::1]:", "a b"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        ([["10.0.0.1", "fd12::1"], ["fd12::2", "10.0.0.2"]], Family(4, ("10.0.0.1", "10.0.0.2"))),
        ([["10.0.0.1", "fd12::1"], ["fd12::2"]], Family(6, ("fd12::1", "fd12::2"))),
        ([["10.0.0.1"], ["fd12::2"]], None),
        ([["::1"]], Family(6, ("::1",))),
        ([], None),
    ],
)
def test_one_family_for_all_nodes(addresses: list[list[str]], chosen: Family | None) -> None:
    """F096."""
    assert pick_family(addresses) == chosen


def test_a_host_without_ipv4_is_reached_over_ipv6() -> None:
    """F096."""
    made = plan(job(), facts(interfaces=(Interface(name="lo", addresses=("::1",), loopback=True),)))
    assert made.nodes[0].address == "::1"
    assert "--master-addr ::1 " in made.torchrun[0]


class TestOneWatch:
    """F072: blocking wait and asynchronous error handling are two answers to one question."""

    def test_blocking_wait_takes_the_place_of_the_default(self) -> None:
        made = plan(job(network={"torch_nccl": {"BLOCKING_WAIT": True}}), facts())
        assert env(made)["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        assert env(made)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert origins(made)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "default beside TORCH_NCCL_BLOCKING_WAIT"

    def test_off_leaves_the_default(self) -> None:
        made = plan(job(network={"torch_nccl": {"BLOCKING_WAIT": False}}), facts())
        assert env(made)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"

    def test_both_named_is_a_problem_with_both_values(self) -> None:
        network = {"torch_nccl": {"BLOCKING_WAIT": True, "ASYNC_ERROR_HANDLING": 3}}
        with pytest.raises(RecipeError, match="BLOCKING_WAIT=1 and TORCH_NCCL_ASYNC_ERROR_HANDLING=3"):
            plan(job(network=network), facts())

    def test_both_from_the_environment_is_a_problem_too(self) -> None:
        given = {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        with pytest.raises(RecipeError, match="torch obeys only the first"):
            plan(job(), facts(environment=given))


class TestNobodyElseAborts:
    """A survivor aborts NCCL itself; what the job needs for that is in the plan, and not set behind its back."""

    NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

    def test_rescue_on_gpus_turns_the_handling_of_torch_off(self) -> None:
        made = plan(job(faults={"rescue": True}), facts(gpus=4))
        assert made.rescue
        assert (env(made)[self.NAME], origins(made)[self.NAME]) == ("0", "default beside faults.rescue")

    def test_else_it_is_as_under_torchrun(self) -> None:
        assert env(plan(job(), facts(gpus=4)))[self.NAME] == "1"
        assert env(plan(job(faults={"rescue": True}), facts()))[self.NAME] == "1"

    def test_both_named_is_a_problem(self) -> None:
        recipe = job(faults={"rescue": True}, network={"torch_nccl": {"ASYNC_ERROR_HANDLING": 3}})
        with pytest.raises(RecipeError, match=f"faults.rescue: true and {self.NAME}=3"):
            plan(recipe, facts(gpus=4))
