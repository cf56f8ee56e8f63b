"""Whatever happens to a run, in whatever order: the head keeps its promises."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from launcher.agent.causes import Failure
from launcher.agent.effects import Effect, Finish, Record, Send
from launcher.agent.head import Head, Phase
from launcher.runs.states import Cause, RunState

NODES = st.integers(0, 2)
CAUSES = st.sampled_from([c for c in Cause if c not in (Cause.DONE, Cause.CANCELLED, Cause.REFUSED, Cause.INTERNAL)])


class HeadMachine(RuleBasedStateMachine):
    """Three nodes; messages may be lost, late, repeated or out of order."""

    @initialize(budget=st.integers(0, 2), resumable=st.booleans(), attempt=st.integers(0, 3), succeeds=st.booleans())
    def begin(self, budget: int, resumable: bool, attempt: int, succeeds: bool) -> None:
        self.head = Head(
            node_count=3,
            max_restarts=budget,
            resumable=resumable,
            grace_s=30.0,
            join_timeout_s=300.0,
            pick_port=lambda: 5000,
            hosts={},
            master_addr="127.0.0.1",
            now_s=0.0,
            attempt=attempt,
        )
        self.ready_nodes: set[int] = set()
        self.attempts: list[int] = []
        self.finishes: list[Finish] = []
        self.stopped = False
        if attempt and succeeds:
            self.take(self.head.succeed())

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Finish):
                self.finishes.append(effect)
            elif isinstance(effect, Send) and effect.message["type"] == "start":
                assert self.ready_nodes == {0, 1, 2}, "a start while a node was not ready"
                assert not self.stopped, "a start after a stop"
                assert not self.finishes, "a start after the end"
                self.attempts.append(effect.message["attempt"])
                self.ready_nodes = set()
            elif isinstance(effect, Record) and effect.event == "restarting":
                assert not self.stopped
                assert self.head.resumable
                self.ready_nodes = set()

    @rule(node=NODES)
    def joined(self, node: int) -> None:
        self.ready_nodes.discard(node)
        self.take(self.head.joined(node, f"n{node}"))

    @rule(node=NODES)
    def ready(self, node: int) -> None:
        if self.head.phase is Phase.JOINING:
            self.ready_nodes.add(node)
        self.take(self.head.ready(node))

    @rule()
    def everybody_ready(self) -> None:
        for node in range(3):
            self.ready(node)

    @rule(node=NODES, late=st.booleans(), code=st.sampled_from([0, 75]))
    def done(self, node: int, late: bool, code: int) -> None:
        self.take(self.head.done(node, self.head.attempt - late, {node: code}))

    @rule(node=NODES, cause=CAUSES, late=st.booleans(), code=st.sampled_from([1, 2, 7, 137, 143]))
    def failed(self, node: int, cause: Cause, late: bool, code: int) -> None:
        failure = Failure(
            attempt=self.head.attempt - late,
            node=node,
            rank=node,
            pid=1,
            exit_code=code,
            cause=cause,
            message="boom",
            place="",
            log="",
        )
        self.take(self.head.failed(failure))

    @rule(node=NODES)
    def lost(self, node: int) -> None:
        self.ready_nodes.discard(node)
        self.take(self.head.lost(node, "closed"))

    @rule(node=NODES, signum=st.sampled_from([1, 2, 15]), grace_s=st.sampled_from([None, 5.0]))
    def stop(self, node: int, signum: int, grace_s: float | None) -> None:
        effects = self.head.stop(node, "asked", signum, grace_s)
        self.stopped = True
        self.take(effects)

    @rule(node=NODES)
    def duplicate(self, node: int) -> None:
        self.take(self.head.duplicate(node, "elsewhere"))

    @rule(passed_s=st.sampled_from([0.0, 0.25, 1.0, 11.0, 31.0, 301.0]), heard=st.sets(NODES))
    def time_passes(self, passed_s: float, heard: set[int]) -> None:
        self.head.now_s += passed_s
        for node in heard:
            self.head.heard(node)
        effects = self.head.tick()
        for effect in effects:
            if isinstance(effect, Record) and effect.event == "node_lost":
                self.ready_nodes.discard(effect.fields["node"])
        self.take(effects)

    @invariant()
    def one_end(self) -> None:
        assert len(self.finishes) <= 1
        assert (self.head.phase is Phase.OVER) == bool(self.finishes)

    @invariant()
    def attempts_increase(self) -> None:
        assert self.attempts == sorted(set(self.attempts))

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.head.restarts <= self.head.max_restarts

    @invariant()
    def only_a_success_is_zero(self) -> None:
        for end in self.finishes:
            assert (end.exit_code == 0) == (end.state is RunState.SUCCEEDED)

    def teardown(self) -> None:
        """From anywhere, two requests to stop and the agents' answers are the end."""
        if not hasattr(self, "head"):
            return
        for _ in range(2):
            self.stop(0, 2, None)
        for node in range(3):
            self.ready(node)
        assert len(self.finishes) == 1


HeadMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHead = HeadMachine.TestCase
