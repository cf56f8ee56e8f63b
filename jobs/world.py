"""The ranks of a run: who this one is (torchrun's environment), and how all agree before there is a process group."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous

from jobs.private_torch import PrefixStore, Store
from launcher.wording import count

T = TypeVar("T")

LONG_S = 2 * 3600.0
"""For what may take long with nothing wrong: preparing data, writing and verifying a checkpoint."""
PART_S = 2.0
"""How long rank 0 waits for the others to hear of an error."""
REMIND_S = 10.0
"""How often a wait says for whom it waits."""


class PeerError(RuntimeError):
    """Another rank could not do its part."""

    launch_plain = True


class WorldError(RuntimeError):
    """The ranks that met are not the ones that were started for this run."""

    launch_plain = True


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank and sizes, from the environment that torchrun and our agent set alike."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int = 0
    """Of the plan; without our agent, torchrun's number of it."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises WorldError where one is missing."""
        wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in wanted if name not in env]
        if missing:
            raise WorldError(
                f"{', '.join(missing)}: not set; start this with `launch RECIPE` or `torchrun -m jobs.train`"
            )
        rank, size, local_rank, local_size = (int(env[name]) for name in wanted)
        node = int(env.get("LAUNCH_NODE") or env.get("GROUP_RANK") or 0)
        return cls(rank=rank, size=size, local_rank=local_rank, local_size=local_size, node=node)


class Meeting:
    """Agreement over the store. Waits long, and says for whom; what fails on one rank is raised on all."""

    def __init__(self, store: Store, world: World, *, timeout_s: float = LONG_S) -> None:
        self.world = world
        self._store, self._timeout_s = store, timeout_s

    @classmethod
    def join(cls, world: World, *, prefix: str) -> tuple[Meeting, Store]:
        """Meet the other ranks at MASTER_ADDR:MASTER_PORT.

        The prefix keeps what is left of an earlier attempt apart where a store outlives it (torchrun's does).
        """
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=LONG_S))))
        return cls(PrefixStore(f"{prefix}/meeting", store), world), PrefixStore(f"{prefix}/group", store)

    def again(self, name: str) -> Meeting:
        """A meeting of the same ranks with words of its own: what was agreed on before is not taken for an answer."""
        return Meeting(PrefixStore(name, self._store), self.world, timeout_s=self._timeout_s)

    def gather(self, what: str, function: Callable[[], T]) -> list[T]:
        """Call the function on every rank and return all results (JSON values), in the order of the ranks."""
        own = self._outcome(function)
        self._store.set(f"{what}/{self.world.rank}", json.dumps(own))
        if self.world.rank == 0:
            keys = [f"{what}/{rank}" for rank in range(self.world.size)]
            self._wait(what, keys)
            self._store.set(what, json.dumps([json.loads(value) for value in self._store.multi_get(keys)]))
        self._wait(what, [what])
        return [self._value(what, rank, outcome) for rank, outcome in enumerate(json.loads(self._store.get(what)))]

    def decide(self, what: str, choose: Callable[[], T]) -> T:
        """Call the function on rank 0 and return its result (a JSON value) on every rank."""
        if self.world.rank == 0:
            self._store.set(what, json.dumps(self._outcome(choose)))
        self._wait(what, [what])
        decision: T = self._value(what, 0, json.loads(self._store.get(what)))
        return decision

    def part(self, what: str) -> None:
        """Before all ranks end with an error that all of them know: let the others read it.

        Rank 0 holds the store. Where it ends first, the others say that they lost a peer, at length, and not why.
        """
        if self.world.rank:
            self._store.set(f"{what}/{self.world.rank}/known", "")
            return
        keys = [f"{what}/{rank}/known" for rank in range(1, self.world.size)]
        deadline_s = time.monotonic() + PART_S
        while keys and not self._store.check(keys) and time.monotonic() < deadline_s:
            time.sleep(0.005)

    def _outcome(self, function: Callable[[], Any]) -> dict[str, Any]:
        try:
            return {"value": function()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it; raised again in _value
            self._error: Exception = error
            return {"error": f"{type(error).__name__}: {error}"}

    def _value(self, what: str, rank: int, outcome: dict[str, Any]) -> Any:
        if "error" not in outcome:
            return outcome["value"]
        self.part(what)
        if rank == self.world.rank:
            raise self._error
        raise PeerError(f"rank {rank} could not {what}: {outcome['error']}")

    def _wait(self, what: str, keys: list[str]) -> None:
        """Wait for keys by asking: a wait inside the store would hold back signals and print warnings of its own."""
        begin = time.monotonic()
        reminder, pause_s = REMIND_S, 0.001
        while not self._store.check(keys):
            waited = time.monotonic() - begin
            if waited > self._timeout_s:
                raise WorldError(f"waited {waited:.0f} s for {self._missing(keys)} ({what})")
            if waited > reminder:
                print(f"waiting for {self._missing(keys)} to {what}, {waited:.0f} s", flush=True)
                reminder += REMIND_S
            time.sleep(pause_s)
            pause_s = min(0.05, pause_s * 1.5)

    def _missing(self, keys: list[str]) -> str:
        if len(keys) == 1:
            return "rank 0"
        missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        return f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"


def check_identity(identities: list[str]) -> None:
    """Raise WorldError unless all ranks belong to the same attempt of the same run."""
    if len(set(identities)) > 1:
        rank = next(rank for rank, identity in enumerate(identities) if identity != identities[0])
        raise WorldError(
            f"rank 0 belongs to {identities[0]}, rank {rank} to {identities[rank]}; they must be the same run"
        )


def check_size(size: int, planned: range | None) -> None:
    """Raise WorldError unless the ranks that have met are as many as the plan allows; None = it is not said.

    The reason is a node that could not see the others and trained alone, silently.
    """
    if planned is not None and size not in planned:
        allowed = str(planned[0]) if len(planned) == 1 else f"{planned[0]} to {planned[-1]} in steps of {planned.step}"
        raise WorldError(f"the world size is {size}, the plan says {allowed}")


def pick_device(wanted: str, world: World) -> torch.device:
    """The device of this rank; `auto` = cuda where there is one for each rank of this node, else cpu.

    `cuda:1` is that one of those that this process sees, for the one rank of a node. Raises WorldError where cuda was
    asked for and is not there: nothing falls back silently.
    """
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and gpus < world.local_size):
        return torch.device("cpu")
    _, colon, index = wanted.partition(":")
    if colon and world.local_size > 1:
        raise WorldError(f"resources.device: {wanted} is one GPU, and this node has {world.local_size} ranks; use cuda")
    if gpus < world.local_size or (colon and int(index) >= gpus):
        raise WorldError(
            f"resources.device: {wanted}, for {count(world.local_size, 'rank')} on this node; CUDA devices here: {gpus}"
        )
    device = torch.device("cuda", int(index) if colon else world.local_rank)
    torch.cuda.set_device(device)
    return device


def init_groups(store: Store, world: World, device: torch.device, *, timeout_s: float) -> ProcessGroup:
    """Start torch.distributed. Returns a second group with a long timeout, for what may take long (checkpoints)."""
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=None if device.type == "cpu" else device,
    )
    group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONG_S))
    return group
