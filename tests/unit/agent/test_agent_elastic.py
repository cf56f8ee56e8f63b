"""torch.distributed.elastic has what we build on, in the shape that we assume. Run with each supported torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    rendezvous_handler_registry,
)

from launcher.agent.elastic import BACKEND, HeadRendezvous, NodeElasticAgent, run_elastic_agent
from launcher.agent.worker import Attempt

FIRST, SECOND = (
    Attempt(attempt=1, restarts=0, master_addr="127.0.0.1", master_port=5001),
    Attempt(attempt=2, restarts=1, master_addr="127.0.0.1", master_port=5002),
)


class ScriptedNode:
    """A node whose head gives these attempts, and whose workers end with these codes in the last one."""

    def __init__(self, attempts: list[Attempt], codes: dict[int, int | None]) -> None:
        self.run_id, self.node, self.node_count, self.nproc, self.max_restarts = "run", 1, 3, 2, 3
        self._attempts = iter(attempts)
        self._left = len(attempts)
        self._codes = codes
        self.started: list[Attempt] = []
        self.calls: list[str] = []

    def next_attempt(self) -> Attempt | None:
        return next(self._attempts, None)

    def start_workers(self, attempt: Attempt) -> dict[int, int]:
        self.calls.append("start")
        self.started.append(attempt)
        return {0: 100, 1: 101}

    def wait_for_order(self) -> bool:
        self.calls.append("wait")
        self._left -= 1
        return self._left > 0

    def kill_workers(self) -> None:
        self.calls.append("kill")

    def exit_codes(self) -> dict[int, int | None]:
        return self._codes

    def failures(self) -> dict[int, tuple[int, int, int, str]]:
        return {rank: (rank % 2, 100 + rank % 2, code, "/dev/null") for rank, code in self._codes.items() if code}


@pytest.fixture(autouse=True)
def registry_restored() -> Iterator[None]:
    yield
    rendezvous_handler_registry._registry.pop(BACKEND, None)


def test_the_elastic_agent_runs_the_attempts_of_the_head_and_ends_when_there_is_no_more() -> None:
    node = ScriptedNode([FIRST, SECOND], {2: 0, 3: 0})
    run_elastic_agent(node)
    assert node.started == [FIRST, SECOND]
    assert node.calls[:6] == ["start", "wait", "kill", "start", "wait", "kill"]
    assert set(node.calls[6:]) <= {"kill"}


def test_a_run_that_is_over_before_it_began_starts_nothing() -> None:
    node = ScriptedNode([], {})
    run_elastic_agent(node)
    assert "start" not in node.calls


def test_failed_workers_are_told_in_the_words_of_torch() -> None:
    node = ScriptedNode([FIRST], {2: 0, 3: 7})
    agent = NodeElasticAgent(spec_of(node), node)
    result = agent.run()
    assert result.state is api.WorkerState.FAILED
    assert result.is_failed()
    assert result.failures[3].exitcode == 7
    assert result.failures[3].local_rank == 1


def test_ranks_follow_the_order_of_the_plan() -> None:
    node = ScriptedNode([FIRST], {2: 0, 3: 0})
    agent = NodeElasticAgent(spec_of(node), node)
    assert agent.run().state is api.WorkerState.SUCCEEDED
    workers = agent._worker_group.workers
    assert [(w.local_rank, w.global_rank, w.role_rank, w.world_size) for w in workers] == [(0, 2, 2, 6), (1, 3, 3, 6)]
    assert [w.id for w in workers] == [100, 101]


def test_the_remaining_restarts_are_those_of_the_whole_run() -> None:
    node = ScriptedNode([FIRST, SECOND], {2: 0, 3: 0})
    agent = NodeElasticAgent(spec_of(node), node)
    agent.run()
    assert agent._remaining_restarts == 2


def test_the_rendezvous_says_who_this_node_is() -> None:
    handler = HeadRendezvous(ScriptedNode([FIRST], {}))
    info = handler.next_rendezvous()
    assert isinstance(info, RendezvousInfo)
    assert (info.rank, info.world_size) == (1, 3)
    assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) == ("127.0.0.1", 5001)
    with pytest.raises(RendezvousGracefulExitError):
        handler.next_rendezvous()


def test_the_rendezvous_has_every_method_that_torch_asks_for() -> None:
    assert isinstance(HeadRendezvous(ScriptedNode([], {})), RendezvousHandler)
    assert not getattr(HeadRendezvous, "__abstractmethods__", frozenset())


def test_abstract_methods_of_the_elastic_agent_are_the_four_that_we_implement() -> None:
    assert api.SimpleElasticAgent.__abstractmethods__ == {
        "_start_workers",
        "_stop_workers",
        "_monitor_workers",
        "_shutdown",
    }
    assert not NodeElasticAgent.__abstractmethods__


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_start_workers", ["self", "worker_group"]),
        ("_stop_workers", ["self", "worker_group"]),
        ("_monitor_workers", ["self", "worker_group"]),
        ("_shutdown", ["self", "death_sig", "timeout"]),
        ("_invoke_run", ["self", "role"]),
        ("_initialize_workers", ["self", "worker_group"]),
        ("_assign_worker_ranks", ["self", "store", "group_rank", "group_world_size", "spec"]),
    ],
)
def test_private_methods_that_we_override_or_call_take_what_we_give(method: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(api.SimpleElasticAgent, method)).parameters) == parameters


def test_values_that_we_make_have_the_fields_that_we_set() -> None:
    assert {"local_rank", "global_rank", "role_rank", "world_size", "role_world_size"} <= set(
        inspect.signature(api.Worker).parameters
    )
    assert {"role", "local_world_size", "entrypoint", "rdzv_handler", "max_restarts"} <= {
        field.name for field in dataclasses.fields(api.WorkerSpec)
    }
    assert {"state", "return_values", "failures"} == {field.name for field in dataclasses.fields(api.RunResult)}
    assert {"local_rank", "pid", "exitcode", "error_file"} <= {f.name for f in dataclasses.fields(ProcessFailure)}
    assert {"UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED"} <= set(api.WorkerState.__members__)


def spec_of(node: ScriptedNode) -> api.WorkerSpec:
    return api.WorkerSpec(
        role="default",
        local_world_size=node.nproc,
        entrypoint="worker",
        rdzv_handler=HeadRendezvous(node),
        max_restarts=node.max_restarts,
    )
