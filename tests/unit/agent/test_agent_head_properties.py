"""Whatever happens to a run, in whatever order: the head keeps its promises."""

from __future__ import annotations

from typing import Any

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

    @initialize(
        budget=st.integers(0, 2),
        resumable=st.booleans(),
        attempt=st.integers(0, 3),
        succeeds=st.booleans(),
        fields=st.fixed_dictionaries({"rescues": st.booleans(), "min_nodes": st.sampled_from([None, 1, 2])}),
    )
    def begin(self, budget: int, resumable: bool, attempt: int, succeeds: bool, fields: dict[str, Any]) -> None:
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
            **fields,
        )
        self.ready_nodes: set[int] = set()
        self.attempts: list[int] = []
        self.finishes: list[Finish] = []
        self.stopped = False
        self.asked: list[tuple[int, dict[str, Any]]] = []
        if attempt and succeeds:
            self.take(self.head.succeed())

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Finish):
                self.finishes.append(effect)
            elif isinstance(effect, Send) and effect.message["type"] == "start":
                nodes = {0, 1, 2} if effect.node is None else {effect.node}
                assert nodes <= self.ready_nodes, "a start while a node was not ready"
                assert not self.stopped, "a start after a stop"
                assert not self.finishes, "a start after the end"
                self.attempts.append(effect.message["attempt"])
                self.ready_nodes -= nodes
            elif isinstance(effect, Send) and effect.message["type"] == "kill" and effect.node is None:
                self.ready_nodes = set()
            elif isinstance(effect, Send) and effect.message["type"] in ("report", "keep"):
                assert effect.node is not None
                self.asked.append((effect.node, effect.message))
            elif isinstance(effect, Record) and effect.event == "restarting":
                assert not self.stopped
                assert self.head.resumable

    @rule(node=NODES, holds=st.booleans())
    def joined(self, node: int, holds: bool) -> None:
        self.ready_nodes.discard(node)
        self.take(self.head.joined(node, f"n{node}", holds=self.head.attempt if holds else None))

    @rule(node=NODES)
    def ready(self, node: int) -> None:
        if self.head.phase is Phase.JOINING or node not in self.head.members.attempt:
            self.ready_nodes.add(node)
        self.take(self.head.ready(node))

    @rule()
    def everybody_ready(self) -> None:
        for node in range(3):
            self.ready(node)

    @rule(node=NODES, late=st.booleans(), code=st.sampled_from([0, 75]))
    def done(self, node: int, late: bool, code: int) -> None:
        self.take(self.head.done(node, self.head.attempt - late, {node: code}))

    @rule(node=NODES, late=st.booleans(), step=st.sampled_from([None, 6, 7]))
    def holds(self, node: int, late: bool, step: int | None) -> None:
        self.take(self.head.holds(node, self.head.attempt - late, {node: step}))

    @rule(rank=NODES, late=st.booleans(), error=st.sampled_from([None, "no room"]))
    def kept(self, rank: int, late: bool, error: str | None) -> None:
        self.take(self.head.kept(self.head.attempt - late, rank, error))

    @rule(late=st.booleans())
    def saved(self, late: bool) -> None:
        self.take(self.head.saved(self.head.attempt - late))

    @rule(node=NODES)
    def suspected(self, node: int) -> None:
        self.take(self.head.suspected(self.failure(node, Cause.PEER_LOST, self.head.attempt, 1)))

    @rule(node=NODES, cause=CAUSES, late=st.booleans(), code=st.sampled_from([1, 2, 7, 137, 143]))
    def failed(self, node: int, cause: Cause, late: bool, code: int) -> None:
        self.take(self.head.failed(self.failure(node, cause, self.head.attempt - late, code)))

    def failure(self, node: int, cause: Cause, attempt: int, code: int) -> Failure:
        return Failure(
            attempt=attempt,
            node=node,
            rank=node,
            pid=1,
            exit_code=code,
            cause=cause,
            message="boom",
            place="",
            log="",
        )

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
        each = [attempt for index, attempt in enumerate(self.attempts) if [attempt] != self.attempts[index - 1 : index]]
        assert each == sorted(set(each)), "an attempt was begun twice, or went on after a later one"

    @invariant()
    def only_who_takes_part_is_started_and_the_head_node_always_does(self) -> None:
        nodes = self.head.members.attempt
        assert nodes[0] == 0
        assert len(nodes) >= (self.head.min_nodes or 3)

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.head.restarts <= self.head.max_restarts

    @invariant()
    def only_a_success_is_zero(self) -> None:
        for end in self.finishes:
            assert (end.exit_code == 0) == (end.state is RunState.SUCCEEDED)

    def teardown(self) -> None:
        """From anywhere: with the nodes that are there it starts or ends, and two requests to stop are the end."""
        if not hasattr(self, "head"):
            return
        self.nobody_is_waited_for_who_is_gone()
        for _ in range(2):
            self.stop(0, 2, None)
        for node in range(3):
            self.ready(node)
        assert len(self.finishes) == 1

    def nobody_is_waited_for_who_is_gone(self) -> None:
        """Agents that are there answer what they are asked; the others stay away; nobody fails any more."""
        there = [index for index, node in self.head.members.nodes.items() if node.joined]
        by_s = self.head.now_s + 2 * self.head.join_timeout_s
        while self.head.now_s < by_s:
            self.head.now_s += 1.0
            for node in there:
                self.head.heard(node)
                if self.head.phase in (Phase.JOINING, Phase.ENDING):
                    self.ready(node)
            asked, self.asked = self.asked, []
            for node, message in asked:
                if node in there and message["type"] == "report":
                    self.take(self.head.holds(node, message["attempt"], {node: 7}))
                elif node in there:
                    self.take(self.head.kept(message["attempt"], message["rank"], None))
            self.take(self.head.tick())
            if self.head.phase is Phase.OVER or (self.head.phase is Phase.RUNNING and not self.head.waits):
                return
        raise AssertionError(f"it still waits, {self.head.phase}, with {there}")


HeadMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHead = HeadMachine.TestCase
