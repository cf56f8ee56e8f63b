"""The head agent's decisions, as a pure state machine: messages of agents and the clock in, orders and records out.

    JOINING --all ready--> RUNNING --all done--> OVER
       ^                     |  |
       |                     |  +--stop--> STOPPING --all done--> OVER
       +--retry-- RESCUING --+--failure, no retry--> ENDING --all killed--> OVER

It owns the attempt number, the restart budget and how the run ends. Any node may be lost and come back at any time. Who
takes part is `members.py`'s, which failure was the first `weighing.py`'s, what survivors keep `rescue.py`'s, stops are
`stopping.py`'s, and whether the workers get on is `watch.py`'s; sockets, ports and files are `office.py`'s and
`node.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from launcher.agent.causes import STOPPED_EXIT_CODE, Failure
from launcher.agent.effects import Effect, Finish, Leave, Record, Say, Send
from launcher.agent.limits import Limit
from launcher.agent.members import SILENCE_S, Members, listed
from launcher.agent.patience import Limits
from launcher.agent.preflight import Preflight, Report
from launcher.agent.rescue import Rescue
from launcher.agent.restarts import decide
from launcher.agent.stopping import Stopping
from launcher.agent.watch import Rank, Watch
from launcher.agent.weighing import Weighing
from launcher.runs.rundir import RunDir
from launcher.runs.states import NOT_RETRIED, Cause, RunState, is_signal
from launcher.wording import signal_name

_KILLED = 128 + SIGKILL
WAITING_EVERY_S = 10.0
REJOIN_S = 20.0
"""In an allocation: how long a lost node may take to come back, which it does if only its agent was killed."""
SAVE_S = 3.0
"""So long before the end of the grace time, or a sixth of it, one worker saves, if all together have not done so."""


class Phase(StrEnum):
    """Where the run stands, for the head."""

    JOINING = "joining"
    RUNNING = "running"
    RESCUING = "rescuing"
    STOPPING = "stopping"
    ENDING = "ending"
    OVER = "over"


@dataclass
class Head:
    """Call the methods as things happen; carry out the effects they return, in order."""

    node_count: int
    max_restarts: int
    resumable: bool
    grace_s: float
    join_timeout_s: float
    pick_port: Callable[[], int]
    """A free port on node 0 for the workers' store; called once per attempt."""
    hosts: Mapping[int, str]
    master_addr: str
    now_s: float
    workers_per_node: int = 1
    min_nodes: int | None = None
    """With how few nodes it goes on. None: it needs all of them."""
    present_nodes: int | None = None
    """How many of the nodes can come, where that is known."""
    rescues: bool = False
    """Whether survivors keep their state before a restart."""
    members_before: tuple[int, ...] = ()
    """The nodes of the last attempt, where this head takes over. Empty: all."""
    attempt: int = 0
    """The last one that was started."""
    restarts: int = 0
    all_signalled: bool = False
    """Whether who stops the run signals all its processes at once, so that an agent hears it twice."""
    allocation: int | None = None
    """Its number, in a SLURM job: a stop, or a node that stays away, ends that and not the run. What follows is for the
    batch side to say."""
    ends_s: float | None = None
    """When SLURM ends the job, where that is known."""
    limit: Limit | None = None
    """The run's own."""
    find_newest: Callable[[], str | None] = lambda: None
    """What the plan's `resume_newest` finds; called once per attempt, so that all ranks get the same."""
    placed: Callable[[Failure], Failure] = lambda failure: failure
    """Adds to a failure what is known here of where in the training it came."""
    watch: Watch = field(default_factory=lambda: Watch(limits=Limits()))
    """Whether the workers get on."""
    preflight: Preflight | None = None
    """What comes before the first attempt on several nodes. None: nothing does."""
    phase: Phase = Phase.JOINING
    first_failure: Failure | None = None
    """Of the last attempt that was started."""
    previous: Failure | None = None
    """The first failure of the attempt before."""
    attempt_here: int = 0
    """The last one that this head, or the one before it in the same allocation, has started."""
    members: Members = field(init=False)
    _rescue: Rescue | None = None
    _kept: Rescue | None = None
    """The one that has kept the newest state. None: that is a checkpoint of the training's own."""
    _afterwards: Finish | Leave | None = None
    """What a rescue of the last state, to disk, is followed by if it fails. None: a restart follows."""
    _save_until_s: float = math.inf
    """When that one is given up."""
    _scaled_because: str = ""
    """Why the next attempt has other nodes than the last one."""
    _weighing: Weighing = field(init=False)
    _deadline_s: float | None = None
    """When a stop has taken long enough."""
    _since_s: float = 0.0
    _said_waiting_s: float = 0.0
    _stop: Stopping = field(init=False)
    _end: Finish | Leave | None = None

    def __post_init__(self) -> None:
        self._stop = Stopping(
            now_s=self.now_s,
            grace_s=self.grace_s,
            in_allocation=self.allocation is not None,
            ends_s=self.ends_s,
            limit=self.limit,
        )
        self._weighing = Weighing(all_signalled=self._is_all_signalled)
        self.members = Members.of(
            self.node_count,
            self.hosts,
            workers_per_node=self.workers_per_node,
            minimum=self.min_nodes,
            present=self.present_nodes,
            taking_part=self.members_before,
        )
        self._since_s = self._said_waiting_s = self.now_s

    # ---------------------------------------------------------------- what agents say

    def succeed(self) -> list[Effect]:
        """This head takes over from one whose process was lost in the middle of an attempt."""
        self.phase, self.attempt_here = Phase.RUNNING, self.attempt
        for node in self.members.nodes.values():
            node.heard_at_s = self.now_s  # by the head before this one
        return self.lost(0, "its process ended")

    def recall(self, node: int, host: str, *, attempt: int, restarts: int, holds: int | None) -> list[Effect]:
        """An agent that joins knows of an attempt that this head has no record of: the disk of node 0 was lost.

        Call it before `joined`. The numbers of the attempts go on; what its workers hold, if they hold that attempt, is
        kept as after any other loss of node 0.
        """
        if attempt <= self.attempt or self.attempt_here:
            return []
        self.attempt, self.restarts = attempt, max(self.restarts, restarts)
        text = f"the record of this run was lost here; node {node} ({host}) knows of attempt {attempt}"
        effects: list[Effect] = [Record("record_lost", {"attempt": attempt, "known_by": node, "host": host}), Say(text)]
        if holds != attempt:
            return effects
        own = self.members.nodes[0].host
        return [*effects, *self.succeed(), *self.joined(0, own)]

    def joined(self, node: int, host: str, *, holds: int | None = None) -> list[Effect]:
        """An agent has connected as this node. holds: the attempt of the workers that it has, if it has any."""
        member = self.members.nodes[node]
        member.joined, member.ready, member.host, member.heard_at_s = True, False, host, self.now_s
        effects: list[Effect] = [Record("node_joined", {"node": node, "host": host})]
        if self._rescue is not None and holds == self.attempt and node in self.members.attempt:
            return [*effects, *self._rescue.returned(node, self.now_s)]
        if self._rescue is not None:
            self._rescue.left(node)
            effects += self._go_on_rescuing()
        if self.phase is Phase.OVER and self._end is not None:
            return [*effects, Send({"type": "end", "exit_code": self._end.exit_code}, node)]
        if self.phase is Phase.ENDING:
            return [*effects, Send({"type": "kill"}, node)]
        return [*effects, Send({"type": "welcome"}, node)]

    def duplicate(self, node: int, host: str) -> list[Effect]:
        """A second agent claims a node rank that is taken, so another rank is missing. Ends the run."""
        if self.phase in (Phase.ENDING, Phase.OVER):
            return []
        text = f"node rank {node} was claimed twice: by {self.members.nodes[node].host} and by {host}"
        return self._finish_with(RunState.FAILED, Cause.RENDEZVOUS, 1, text)

    def heard(self, node: int) -> None:
        """An agent is alive (again, if it was suspended for so long that it counted as lost)."""
        member = self.members.nodes[node]
        member.joined, member.heard_at_s = True, self.now_s

    def frozen(self, gap_s: float) -> None:
        """We were stopped ourselves for so long, perhaps with all the others: nobody was silent, or late, meanwhile."""
        self.members.frozen(gap_s)
        self._since_s += gap_s
        self._said_waiting_s += gap_s

    @property
    def waits(self) -> bool:
        """Whether something is about to follow, also if nobody says a word more."""
        return self._deadline_s is not None or self._weighing.until_s is not None

    def is_lost(self, node: int) -> bool:
        """Whether a node has never joined, or was given up."""
        return not self.members.nodes[node].joined

    def ready(self, node: int) -> list[Effect]:
        """An agent has no workers (any more) and waits for orders."""
        if self.phase not in (Phase.JOINING, Phase.ENDING) and node in self.members.attempt:
            return []  # said before it knew of the start
        self.members.nodes[node].ready = True
        return self._advance()

    def preflighted(self, node: int, report: Report) -> list[Effect]:
        """A node has said what it gives, or whom it reaches."""
        if self.preflight is None or self.phase is not Phase.JOINING:
            return []
        return self._after_preflight(self.preflight.heard(node, report, self.now_s))

    def done(self, node: int, attempt: int, exit_codes: Mapping[int, int]) -> list[Effect]:
        """All workers of a node have ended by themselves, each with 0 or 75."""
        if attempt != self.attempt:
            return []
        self.members.nodes[node].done = dict(exit_codes)
        return self._advance()

    def failed(self, failure: Failure) -> list[Effect]:
        """A worker has ended as it should not have."""
        if failure.attempt != self.attempt or self.phase in (Phase.JOINING, Phase.OVER):
            return []
        if self.phase is Phase.ENDING and failure.cause is Cause.SIGNAL and failure.exit_code == _KILLED:
            return []  # by us, with the others: worker_ended records it
        self._weighing.failed.add(failure.rank)
        effects: list[Effect] = [Record("failure", failure.to_record())]
        if self.phase is Phase.ENDING:
            return effects
        if self._rescue is not None:
            self._rescue.gone(failure.rank)
            return effects + self._go_on_rescuing()
        if self.phase is Phase.STOPPING:
            return effects + self._stopped_without_checkpoint(failure)
        return effects + self._weigh(failure)

    def suspected(self, failure: Failure) -> list[Effect]:
        """A worker has lost a peer, and holds what it has: `failure` is how it would have ended."""
        if failure.attempt != self.attempt or self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []  # a consequence of what we do about it
        return self.failed(failure)

    def holds(self, node: int, attempt: int, steps: Mapping[int, int | None]) -> list[Effect]:
        """What the living workers of a node could keep, by rank."""
        if self._rescue is None or attempt != self.attempt:
            return []
        self._rescue.holds(node, steps)
        return self._go_on_rescuing()

    def kept(self, attempt: int, rank: int, error: str | None) -> list[Effect]:
        """A worker has written its state where the next attempt finds it, or could not."""
        if self._rescue is None or attempt != self.attempt:
            return []
        self._rescue.kept(rank, error)
        return self._go_on_rescuing()

    def saved(self, attempt: int) -> list[Effect]:
        """A checkpoint is complete: nothing is lost by a restart now, so who has come (back) is taken in."""
        newcomers = self.members.newcomers
        if attempt != self.attempt:
            return []
        self._kept = None
        if self.phase is not Phase.RUNNING or not newcomers or not self.resumable:
            return []
        if self._weighing.first is not None:
            return []  # something else is about to end this attempt
        names = listed({index: self.members.nodes[index].host for index in newcomers})
        self._scaled_because = f"{names} {'have' if len(newcomers) > 1 else 'has'} come"
        ended = {"node": newcomers[0], "rank": -1, "exit_code": 0, "message": self._scaled_because, "step": None}
        restarting = {"attempt": self.attempt + 1, "restarts": self.restarts, "max_restarts": self.max_restarts}
        return [
            Record("attempt_ended", {"attempt": self.attempt, "cause": "scaled", **ended}),
            Record("restarting", restarting),
            Say(f"{self._scaled_because}: starting again with {'it' if len(newcomers) == 1 else 'them'}"),
            *self._before_restart(),
        ]

    def lost(self, node: int, reason: str) -> list[Effect]:
        """The connection to an agent has ended."""
        member = self.members.nodes[node]
        member.joined = member.ready = False
        if self.phase is Phase.OVER:
            return []
        effects: list[Effect] = [Record("node_lost", {"node": node, "host": member.host, "reason": reason})]
        takes_part = node in self.members.attempt
        if self._rescue is not None and takes_part:
            self._rescue.left(node, member.heard_at_s)
            return effects + self._go_on_rescuing()
        if self.phase is Phase.RUNNING and takes_part and member.done is None:
            failure = Failure(
                attempt=self.attempt,
                node=node,
                rank=-1,
                pid=-1,
                exit_code=1,
                cause=Cause.NODE_LOST,
                message=f"the agent of node {node} ({member.host}) was lost: {reason}",
                place="",
                log="",
            )
            return effects + self.failed(failure)
        if self.phase is Phase.STOPPING and takes_part:
            return effects + self._save_and_end(self._stop.end(saved=False))
        if self.preflight is not None:
            self.preflight.lost()
        return effects + self._advance()

    @property
    def _is_all_signalled(self) -> bool:
        """Whether who stops the run signals its workers, too."""
        return self.all_signalled or self.allocation is not None

    def stop(self, node: int, reason: str, signum: int, grace_s: float | None = None) -> list[Effect]:
        """Somebody asks the run to stop. The second request through the same node ends it at once.

        Not in an allocation: there SLURM signals every process, more than once, and ends it itself.
        """
        times = self._stop.asked(node)
        if self.phase in (Phase.ENDING, Phase.OVER):
            return []
        if self.allocation is not None and self._stop.requested:
            return self._hurry()
        if times > 1 and not (self.all_signalled and not self._stop.is_another(self.now_s)):
            return [Say("second request to stop: ending now"), *self._order_end(self._stop.end(saved=False))]
        if self._stop.requested:
            return []
        return self._begin_stop(reason, signum, Cause.SIGNAL if self.allocation else Cause.CANCELLED, grace_s)

    def warned(self, signum: int) -> list[Effect]:
        """SLURM was asked to signal before the end (USR1, USR2), and may do so a minute early.

        With more time left than twice the grace it is noted only: `tick` knows the end, and stops when it is time.
        """
        if self.phase in (Phase.ENDING, Phase.OVER) or self._stop.requested:
            return []
        effects, is_time = self._stop.warning(signum, self.now_s)
        return effects + self._begin_stop(signal_name(signum), SIGTERM, Cause.SIGNAL) if is_time else effects

    def set_limit(self, limit: Limit | None) -> None:
        """The run's own, as it is with the nodes that have started now."""
        self._stop.limit = limit

    def superseded(self) -> list[Effect]:
        """The run goes on in another allocation, while this node was cut off: no word of this one counts any more."""
        if self.phase in (Phase.ENDING, Phase.OVER):
            return []
        reason = "a later allocation of this run has begun"
        return [Say(f"{reason}: ending here"), *self._order_end(Leave(Cause.NODE_LOST, 1, reason, saved=False))]

    def _hurry(self) -> list[Effect]:
        """A stop while stopping: the same one on its way to all processes, or a later one, which shortens the wait."""
        if self._stop.is_another(self.now_s):
            soon_s = self.now_s + self.grace_s / 2
            self._deadline_s = None if self._deadline_s is None else min(self._deadline_s, soon_s)
            self._save_until_s = min(self._save_until_s, soon_s)
        return []

    def _begin_stop(self, reason: str, signum: int, cause: Cause, grace_s: float | None = None) -> list[Effect]:
        self._stop.begin(reason, signum, cause, self.now_s)
        grace_s = self.grace_s if grace_s is None else min(grace_s, self.grace_s)
        effects: list[Effect] = [
            Record("stop_requested", {"reason": reason, "grace_s": grace_s}),
            Say(f"{reason}: stopping; up to {grace_s:g} s to save and leave"),
        ]
        self._save_until_s = self.now_s + grace_s
        early_s = min(SAVE_S, grace_s / 6) if self._keeps else 0.0
        if self.phase is Phase.JOINING:
            if self._kept is None or self._kept.on_disk:
                return effects + self._order_end(self._stop.end(saved=self._kept is not None))
            self._deadline_s = self.now_s + grace_s - early_s  # the next attempt saves what is in memory, and leaves
            return effects
        if self._rescue is not None:
            self._afterwards = self._stop.end(saved=False)
            return effects + self._go_on_rescuing()
        first = self._weighing.first
        if first is not None and (self._weighing.hang is not None or self._is_all_signalled):
            return effects + self._stopped_without_checkpoint(first)  # or the signal was faster than its word
        self.phase, self._deadline_s = Phase.STOPPING, self.now_s + grace_s - early_s
        return [*effects, Send({"type": "stop"})]

    def tick(self) -> list[Effect]:
        """Time has passed (`now_s` is already set)."""
        effects: list[Effect] = []
        for index, member in self.members.nodes.items():
            if member.joined and self.now_s - member.heard_at_s > SILENCE_S:
                # If it ever hears again, it shall end its workers and say that it is ready.
                effects += [Send({"type": "kill"}, index), *self.lost(index, f"nothing heard for {SILENCE_S:g} s")]
        effects += self._watch_clock()
        if self._rescue is not None:
            effects += self._go_on_rescuing()
        elif self.phase is Phase.JOINING and self._deadline_s is not None and self.now_s >= self._deadline_s:
            effects += self._order_end(self._stop.end(saved=False))
        elif self.phase is Phase.JOINING:
            begun = [] if self.preflight is None else self._after_preflight(self.preflight.tick(self.now_s))
            effects += begun or self._advance() or self._wait_for_nodes()
        elif self._deadline_s is not None and self.now_s >= self._deadline_s:
            effects += self._grace_is_over()
        elif self.phase is Phase.RUNNING and self._weighing.is_time(self.now_s):
            effects += self._act_on_first()
        elif self.phase is Phase.RUNNING and self._weighing.first is None:
            effects += self._look_for_hang()
        return effects

    def _look_for_hang(self) -> list[Effect]:
        """Whether the workers get on; a hang that ends the attempt is a failure of the rank that is waited for."""
        effects, failure = self.watch.tick(self.now_s)
        if failure is None:
            return effects
        failure = self.placed(failure)
        record = Record("failure", failure.to_record())
        return [*effects, record, *self._act_on(failure)]

    def _watch_clock(self) -> list[Effect]:
        """Stop in time for the end of the job, and when a limit of the run is reached."""
        if self._stop.requested or self.phase in (Phase.ENDING, Phase.OVER):
            return []
        reason = self._stop.due(self.now_s)
        return [] if reason is None else self._begin_stop(reason, SIGTERM, Cause.TIME_LIMIT)

    # ---------------------------------------------------------------- what follows

    def _advance(self) -> list[Effect]:
        """Do what becomes possible once every node has reported."""
        members, of_attempt = self.members.nodes.values(), self.members.of_attempt
        if self.phase is Phase.JOINING:
            first = not self.attempt_here
            nodes = self.members.to_start(self.now_s, waited_s=self.now_s - self._since_s, first=first)
            if nodes is not None and first and len(nodes) > 1 and self.preflight and not self.preflight.is_over:
                return self.preflight.begin({node: self.members.nodes[node].host for node in nodes}, self.now_s)
            return [] if nodes is None else self._start(nodes)
        if self.phase in (Phase.RUNNING, Phase.STOPPING) and all(member.done is not None for member in of_attempt):
            codes = [code for member in of_attempt for code in (member.done or {}).values()]
            if STOPPED_EXIT_CODE in codes:
                return self._over(self._stop.end(saved=True))
            return self._over(Finish(RunState.SUCCEEDED, Cause.DONE, 0, "all workers finished"))
        if self.phase is Phase.ENDING and all(member.ready or not member.joined for member in members):
            assert self._end is not None
            return self._over(self._end)
        return []

    def _after_preflight(self, effects: list[Effect]) -> list[Effect]:
        """All is well, and the run begins; or it is over, with the reason."""
        assert self.preflight is not None
        if not effects or not self.preflight.is_over:
            return effects
        if self.preflight.faults:
            return effects + self._finish_with(RunState.FAILED, Cause.PREFLIGHT, 1, self.preflight.words)
        return [*effects, Say(self.preflight.words), *self._advance()]

    def _start(self, nodes: tuple[int, ...]) -> list[Effect]:
        self.attempt += 1
        effects = self._scale(nodes) if self.members.is_elastic else []
        is_first, self.attempt_here = not self.attempt_here, self.attempt
        stops = [Send({"type": "stop"})] if self._stop.requested else []
        self.phase = Phase.STOPPING if stops else Phase.RUNNING
        self._deadline_s = self._deadline_s if stops else None
        self._weighing = Weighing(all_signalled=self._is_all_signalled)
        self.previous, self.first_failure = self.first_failure or self.previous, None
        self.members.start(nodes)
        self.watch.begin(self.attempt, {rank: self._place(rank) for rank in self.members.ranks}, self.now_s)
        port, newest = self.pick_port(), self.find_newest()
        order = {
            "type": "start",
            "attempt": self.attempt,
            "restarts": self.restarts,
            "master_addr": self.master_addr,
            "master_port": port,
            "newest": newest,
            "memory_counts": not is_first,
        }
        started = {"attempt": self.attempt, "master_addr": self.master_addr, "master_port": port}
        if newest is not None:
            started["resumes_from"] = newest
        if self.allocation is not None:
            started["allocation"] = self.allocation
        if not self.members.is_elastic:
            return [Record("attempt_started", {**started, "nodes": len(nodes)}), Send(order), *stops]
        order["members"] = list(nodes)
        record = Record("attempt_started", {**started, "nodes": len(nodes), "members": list(nodes)})
        return [*effects, record, *(Send(order, node) for node in nodes), *stops]

    def _place(self, rank: int) -> Rank:
        node = self.members.node_of(rank)
        log = RunDir(Path()).log(attempt=self.attempt, node=node, rank=rank)
        return Rank(node=node, host=self.members.host(rank), log=str(log))

    def _scale(self, nodes: tuple[int, ...]) -> list[Effect]:
        """Say it where an attempt has other nodes than the one before, or the first one not all."""
        before = self.members.attempt if self.attempt_here else tuple(self.members.nodes)
        because, self._scaled_because = self._scaled_because, ""
        if nodes == before:
            return []
        absent = {index: node.host for index, node in self.members.nodes.items() if index not in nodes}
        reason = because or (f"without {listed(absent)}" if absent else "all nodes are there")
        fields = {"attempt": self.attempt, "nodes": list(nodes), "missing": sorted(absent), "reason": reason}
        return [Record("scaled", fields), Say(f"{len(nodes)} of {self.node_count} nodes from here on: {reason}")]

    def _weigh(self, failure: Failure) -> list[Effect]:
        """What a failure in the middle of an attempt leads to."""
        first = self._weighing.add(failure, self.now_s)
        if first is not None:
            return self._act_on(first)
        return self._ask_for_stacks(failure) if self._weighing.hang is failure else []

    def _act_on_first(self) -> list[Effect]:
        """Nothing else has come that could be the cause."""
        first, hang = self._weighing.first, self._weighing.hang
        assert first is not None
        return self._act_on(first if hang is None else self._with_missing(hang))

    def _ask_for_stacks(self, failure: Failure) -> list[Effect]:
        """Who waited is known; for whom, only the others can show, while they live."""
        logs = f"logs/attempt-{self.attempt}/node-*/rank-*.log"
        told = f"{failure.who} waited in vain: the stacks of those that still run go to {logs}"
        told += f"; NCCL's flight recorder: {self.watch.trace}" if self.watch.trace else ""
        return [Record("stacks_requested", {"attempt": self.attempt}), Say(told), Send({"type": "stacks"})]

    def _with_missing(self, failure: Failure) -> Failure:
        """The one who waited, with those who still run after all who waited with it have failed."""
        there = [rank for rank in self.members.ranks if rank not in self._weighing.failed]
        if not there:
            return failure
        headline, *rest = failure.message.splitlines() or [""]
        first = f"{headline}; still running then: {self.members.named(there)}"
        first += f"; {where}" if (where := self.watch.found(there)) else ""
        return replace(failure, message="\n".join([first, *rest]))

    def _act_on(self, failure: Failure) -> list[Effect]:
        self.first_failure = failure
        elsewhere = self.allocation is not None or self.members.is_elastic
        free = elsewhere and failure.cause is Cause.NODE_LOST  # no fault of the run
        verdict = decide(
            failure,
            self.previous,
            resumable=self.resumable,
            restarts=0 if free else self.restarts,
            max_restarts=1 if free else self.max_restarts,
        )
        ended = Record("attempt_ended", _end_of(failure, verdict.cause))
        if verdict.why_not:
            reason = f"{failure.headline}{NOT_RETRIED}{verdict.why_not}"
            end = Finish(RunState.FAILED, verdict.cause, failure.exit_code, reason, policy=verdict.why_not)
            return [ended, *self._order_end(end)]
        self.restarts += 0 if free else 1
        budget = "free" if free else f"restart {self.restarts} of {self.max_restarts}"
        who = f"{failure.who}: " if failure.rank >= 0 else ""  # of a lost node the headline says which
        told = f"{who}{failure.headline}; restarting ({budget})"
        restarting = {"attempt": self.attempt + 1, "restarts": self.restarts, "max_restarts": self.max_restarts}
        return [ended, Record("restarting", restarting), Say(told), *self._before_restart()]

    @property
    def _keeps(self) -> bool:
        """Whether survivors are asked for their state: that of ranks that were out of step is not to be trusted."""
        return self.rescues and not self.watch.mismatched

    def _before_restart(self) -> list[Effect]:
        """Have the survivors keep what they hold, where they can; then end them."""
        if not self._keeps:
            return self._restart()
        return self._begin_rescue(None)

    def _save_and_end(self, end: Finish | Leave) -> list[Effect]:
        """The run ends, and its workers cannot save together any more: one of them shall, where they can."""
        return self._begin_rescue(end) if self._keeps else self._order_end(end)

    def _begin_rescue(self, afterwards: Finish | Leave | None) -> list[Effect]:
        self.phase, self._deadline_s, self._afterwards = Phase.RESCUING, None, afterwards
        self._rescue = Rescue(attempt=self.attempt, began_s=self.now_s)
        nodes = {index: self.members.nodes[index] for index in self.members.attempt}
        joined = [index for index, node in nodes.items() if node.joined]
        returning = {index: node.heard_at_s for index, node in nodes.items() if not node.joined}
        return [*self._rescue.begin(joined, returning), *self._go_on_rescuing()]

    def _go_on_rescuing(self) -> list[Effect]:
        assert self._rescue is not None
        # Memory goes with the processes of the run. It may end, or be requeued, if nodes do not come back.
        self._rescue.to_disk = self._afterwards is not None or not self.members.enough
        effects: list[Effect] = [*self._rescue.advance(self.now_s)]
        late = self._afterwards is not None and self.now_s >= self._save_until_s
        if not self._rescue.over and not late:
            return effects
        if self._afterwards is None:
            self._kept = self._kept if self._rescue.step is None else self._rescue
            return effects + self._restart()
        if self._rescue.step is not None and self._rescue.on_disk:
            return effects + self._order_end(self._stop.end(saved=True))
        by_itself = self._afterwards == self._stop.end(saved=False)
        if self._kept is not None and not self._kept.on_disk and by_itself and not late:
            effects += self._restart()
            self._deadline_s = self._save_until_s  # one attempt more saves what is in memory, and leaves
            return effects
        return effects + self._order_end(self._afterwards)

    def _restart(self) -> list[Effect]:
        """End what is left of the attempt; the next one starts once all are ready."""
        self.phase, self._deadline_s, self._rescue = Phase.JOINING, None, None
        for member in self.members.nodes.values():
            member.ready = False
        self._since_s = self._said_waiting_s = self.now_s
        return [Send({"type": "kill"})]

    def _grace_is_over(self) -> list[Effect]:
        """The workers have not left together."""
        self._deadline_s = None
        end = self._stop.end(saved=False)
        if self._keeps:
            return [Say("the grace time is nearly over: one worker saves for all"), *self._save_and_end(end)]
        return [Say("the grace time is over: ending now, without a new checkpoint"), *self._order_end(end)]

    def _wait_for_nodes(self) -> list[Effect]:
        waited_s = self.now_s - self._since_s
        missing = self.members.missing()
        names = listed(missing)
        gone = [index for index in missing if not self.members.nodes[index].joined]
        if gone and self.attempt_here and self.allocation is not None and waited_s > REJOIN_S:
            node, host = gone[0], missing[gone[0]]
            reason = f"node {node} ({host}) was lost, and did not come back within {REJOIN_S:g} s"
            return [Say(reason), *self._order_end(Leave(Cause.NODE_LOST, 1, reason, saved=False, node=node, host=host))]
        if missing and waited_s > self.join_timeout_s:
            text = f"{names} did not come within {self.join_timeout_s:g} s"
            cause = Cause.NODE_LOST if self.attempt else Cause.RENDEZVOUS
            return self._finish_with(RunState.FAILED, cause, 1, text)
        if missing and self.now_s - self._said_waiting_s >= WAITING_EVERY_S:
            self._said_waiting_s = self.now_s
            fields = {"missing": sorted(missing), "waited_s": round(waited_s, 1)}
            return [Record("waiting", fields), Say(f"waiting for {names}, {waited_s:.0f} s")]
        return []

    def _stopped_without_checkpoint(self, failure: Failure) -> list[Effect]:
        """A worker died of the stop (a script without a handler) or beside it."""
        by_signal = is_signal(failure.exit_code) or failure.cause is Cause.PEER_LOST
        end = self._stop.end(saved=False)
        if not by_signal:
            self.first_failure = failure
            end = replace(end, exit_code=failure.exit_code)
        return self._save_and_end(end)

    def _finish_with(self, state: RunState, cause: Cause, exit_code: int, text: str) -> list[Effect]:
        return [Say(text), *self._order_end(Finish(state, cause, exit_code, text))]

    def _order_end(self, end: Finish | Leave) -> list[Effect]:
        """Kill what runs, then be over."""
        self._end, self.phase, self._deadline_s, self._rescue = end, Phase.ENDING, None, None
        return [Send({"type": "kill"}), *self._advance()]

    def _over(self, end: Finish | Leave) -> list[Effect]:
        self.phase, self._end = Phase.OVER, end
        if isinstance(end, Leave):
            return [end, Send({"type": "end", "exit_code": end.exit_code})]
        fields = {"state": end.state.value, "cause": end.cause.value, "exit_code": end.exit_code, "reason": end.reason}
        return [Record("finished", fields), end, Send({"type": "end", "exit_code": end.exit_code})]


def _end_of(failure: Failure, cause: Cause) -> dict[str, Any]:
    """What is written down about the end of an attempt."""
    kept = {name: getattr(failure, name) for name in ("attempt", "node", "rank", "exit_code", "message", "step")}
    return {**kept, "cause": cause.value}
