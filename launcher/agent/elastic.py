"""Everything of ours that touches torch.distributed.elastic, and every name that torch calls private.

`NodeElasticAgent` is a `SimpleElasticAgent` whose loop takes its orders from the head agent: the stock loop keeps a
restart budget per agent, restarts nobody on a lost heartbeat and waits a fixed 30 s for workers on a restart.
`HeadRendezvous` is a handler in torch's rendezvous registry. tests/unit/agent/test_agent_elastic.py pins what is used.
"""

from __future__ import annotations

import signal
from typing import Any, Protocol

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from launcher.agent.worker import Attempt

BACKEND = "launch-head"


class Node(Protocol):
    """What the elastic agent needs from the process it lives in."""

    run_id: str
    node: int
    node_count: int
    nproc: int
    max_restarts: int

    def next_attempt(self) -> Attempt | None:
        """Wait for the head to start an attempt; None when the run is over instead."""

    def start_workers(self, attempt: Attempt) -> dict[int, int]:
        """Start them; pids by local rank."""

    def wait_for_order(self) -> bool:
        """Wait until the head has an order. True: kill the workers and be ready again. False: the run is over."""

    def kill_workers(self) -> None:
        """End them and what they left behind."""

    def exit_codes(self) -> dict[int, int | None]:
        """By global rank; None for one that runs."""

    def failures(self) -> dict[int, tuple[int, int, int, str]]:
        """local rank, pid, exit code and error file of failed workers, by global rank."""


class HeadRendezvous(RendezvousHandler):
    """Joining is a message to the head agent; the node order is the plan's."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.last: Attempt | None = None

    def get_backend(self) -> str:
        """The name in torch's registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """No: the workers' store is their own, on a fresh port in each attempt; a shared one keeps stale keys."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the head to start an attempt. Raises RendezvousGracefulExitError when the run is over instead."""
        attempt = self._node.next_attempt()
        if attempt is None:
            raise RendezvousGracefulExitError("the run is over")
        self.last = attempt
        store_info = RendezvousStoreInfo(attempt.master_addr, attempt.master_port)
        return RendezvousInfo(HashStore(), self._node.node, self._node.node_count, store_info)

    def is_closed(self) -> bool:
        """Never: the head decides."""
        return False

    def set_closed(self) -> None:
        """Nothing to close: the head decides."""

    def num_nodes_waiting(self) -> int:
        """Nobody waits: the head orders the restart that lets a node in."""
        return 0

    def get_run_id(self) -> str:
        """The run id."""
        return self._node.run_id

    def shutdown(self) -> bool:
        """Nothing is held here."""
        return True


class NodeElasticAgent(SimpleElasticAgent):
    """torch's agent with the head agent's orders in place of its own loop."""

    def __init__(self, spec: WorkerSpec, node: Node) -> None:
        super().__init__(spec)
        self._node = node

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        while True:
            self._initialize_workers(group)
            goes_on = self._node.wait_for_order()
            result = self._monitor_workers(group)
            group.state = result.state
            self._stop_workers(group)
            if not goes_on:
                return result
            group.state = WorkerState.STOPPED

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Every node has the same number of workers, so ranks need no exchange (the stock way: O(nodes) messages)."""
        nproc = spec.local_world_size
        return [
            Worker(
                local_rank=local_rank,
                global_rank=group_rank * nproc + local_rank,
                role_rank=group_rank * nproc + local_rank,
                world_size=group_world_size * nproc,
                role_world_size=group_world_size * nproc,
            )
            for local_rank in range(nproc)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler = worker_group.spec.rdzv_handler
        assert isinstance(handler, HeadRendezvous)
        assert handler.last is not None
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - handler.last.restarts)
        return dict(self._node.start_workers(handler.last))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._node.kill_workers()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failed = self._node.failures()
        if failed:
            failures = {
                rank: ProcessFailure(local_rank=local_rank, pid=pid, exitcode=code, error_file=error_file)
                for rank, (local_rank, pid, code, error_file) in failed.items()
            }
            return RunResult(state=WorkerState.FAILED, failures=failures)
        codes = self._node.exit_codes()
        if any(code is None for code in codes.values()):
            return RunResult(state=WorkerState.UNHEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._node.kill_workers()


def run_elastic_agent(node: Node) -> None:
    """Run torch's agent on this node until the head says that the run is over."""
    rendezvous_handler_registry.register(BACKEND, lambda parameters: HeadRendezvous(parameters.config["node"]))
    parameters = RendezvousParameters(
        backend=BACKEND,
        endpoint="",
        run_id=node.run_id,
        min_nodes=node.node_count,
        max_nodes=node.node_count,
        node=node,
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=node.nproc,
        entrypoint="worker",
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=node.max_restarts,
    )
    NodeElasticAgent(spec, node).run()
