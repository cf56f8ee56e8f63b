"""N agents come together: torch's dynamic rendezvous against the head agent's channel, threads of one process.

`python tests/bench/rendezvous.py [--rounds 3] [--json]`. 16 and 64 agents for both; 128 and 256 for ours alone, in
seconds (torch's does not finish 128 here in 150 s).
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common import arguments, interleave, report

from launcher.agent import channel
from launcher.agent.loop import Loop
from launcher.agent.office import HeadOffice
from launcher.planning.plan import Limits, NodePlan, Plan, WorkerPlan
from launcher.runs.rundir import RunDir

LIMITS = {"16": 0.1, "64": 0.1}
JOIN_TIMEOUT_S = 300.0


def timed(count: int, join: Callable[[int, threading.Barrier], None]) -> float:
    """Start `count` agents as threads, open the gate, and return the seconds until the last has its rank."""
    gate = threading.Barrier(count + 1)
    threads = [threading.Thread(target=join, args=(index, gate), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    gate.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join(JOIN_TIMEOUT_S)
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"{count} agents did not come together in {JOIN_TIMEOUT_S:g} s")
    return time.perf_counter() - begun


def torch_dynamic(count: int) -> float:
    """torch.distributed.elastic's own, over a c10d store, as torchrun uses it."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handlers = []

    def join(index: int, gate: threading.Barrier) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        backend = C10dRendezvousBackend(store, "run")
        handler = DynamicRendezvousHandler.from_backend("run", store, backend, count, count, local_addr="127.0.0.1")
        handlers.append(handler)
        gate.wait()
        handler.next_rendezvous()

    try:
        return timed(count, join)
    finally:
        for handler in handlers:
            handler._stop_heartbeats()


def head_channel(count: int) -> float:
    """Ours: node 0 is the head, the others connect, prove the token, join, and wait for the start."""
    folder = tempfile.TemporaryDirectory(prefix="bench-")
    run = RunDir(Path(folder.name))
    token = os.urandom(32)
    run.token.write_text(token.hex())
    listener = channel.listen("127.0.0.1")
    endpoint = listener.getsockname()[:2]

    def join(index: int, gate: threading.Barrier) -> None:
        loop, started = Loop(), threading.Event()
        if index == 0:
            gate.wait()
            office = HeadOffice(plan_of(count, run), run, loop, listener, to_self=hear(started))
            office.join_self("node-0")
            office.hear_self({"type": "ready"})
            loop.run_until(started.is_set)
            return
        gate.wait()
        connection = channel.connect(endpoint, token, loop, timeout_s=60.0)
        connection.on_message = hear(started)
        connection.send({"type": "join", "node": index, "host": f"node-{index}", "pid": os.getpid()})
        connection.send({"type": "ready"})
        loop.run_until(started.is_set)

    took_s = timed(count, join)
    folder.cleanup()
    return took_s


def hear(started: threading.Event) -> Callable[[dict[str, object]], None]:
    """Note the start."""
    return lambda message: started.set() if message["type"] == "start" else None


def plan_of(count: int, run: RunDir) -> Plan:
    """A plan of `count` nodes; the head reads no more of it than this."""
    nodes = tuple(NodePlan(index=k, host=f"node-{k}", address="127.0.0.1", cpus=(), gpus=()) for k in range(count))
    return Plan(
        run_id="bench",
        name="bench",
        executor="local",
        run_dir=str(run.path),
        recipe_source=None,
        overrides=(),
        recipe={},
        values=(),
        nodes=nodes,
        nproc_per_node=1,
        device="cpu",
        device_reason="",
        backend="gloo",
        interface="lo",
        threads=1,
        master_port=None,
        worker=WorkerPlan(kind="script", module=None, script="", argv=(), cwd="/", preload=None, python=sys.executable),
        env=(),
        limits=Limits(max_restarts=0, grace_s=30.0, network_timeout_s=600.0, join_timeout_s=JOIN_TIMEOUT_S),
        resumable=True,
        agent_argv=(),
        torchrun=(),
        notes=(),
    )


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, rounds=3)
    logging.disable(logging.CRITICAL)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    samples = interleave(
        options.rounds,
        {
            "torch dynamic rendezvous": lambda: {"16": [torch_dynamic(16)], "64": [torch_dynamic(64)]},
            "head channel": lambda: {str(count): [head_channel(count)] for count in (16, 64, 128, 256)},
        },
    )
    theirs, ours = samples["torch dynamic rendezvous"], samples["head channel"]
    ratios = {key: statistics.median(ours[key]) / statistics.median(theirs[key]) for key in LIMITS}
    report("Rendezvous of N agents", samples, ratios, as_json=options.json, limits=LIMITS)
    sys.stdout.flush()
    os._exit(0)  # torch's keep-alive threads would hold the interpreter up


if __name__ == "__main__":
    main()
