"""Whether a run gets on, by the clocks of its ranks: limits, verdicts, who is to blame, who is slow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from launcher.agent.causes import Failure
from launcher.agent.clocks import Clock
from launcher.agent.effects import Effect, Record, Say, Send
from launcher.agent.members import FROZEN_S
from launcher.agent.patience import FACTOR, FLOOR_S, LEARN_STEPS, SCRIPT_FLOOR_S, UNKNOWN_S, Limits, Patience
from launcher.agent.restarts import repeats
from launcher.agent.watch import ANSWER_S, Rank, Watch
from launcher.runs.clock import Phase
from launcher.runs.states import Cause

ALL_REDUCE = [
    ["all_reduce", "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3012],
    ["wrapper", "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 81],
    ["step", "/run/code/train.py", 41],
]
LOADER = [
    ["__next__", "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 700],
    ["step", "/run/code/train.py", 39],
]


def longest(**seconds: float) -> tuple[float, ...]:
    """By phase, as a page has it."""
    return tuple(seconds.get(phase.name.lower(), 0.0) for phase in Phase)


@dataclass
class Run:
    """A run with a clock of its own: ranks mark, agents tell of it every second, the head looks four times a second."""

    watch: Watch
    nodes: int = 2
    per_node: int = 1
    now_s: float = 100.0
    clocks: dict[int, dict[str, Any]] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    failure: Failure | None = None
    silent: set[int] = field(default_factory=set)
    """Nodes whose agents say nothing."""

    def __post_init__(self) -> None:
        ranks = {
            rank: Rank(node=rank // self.per_node, host=f"n{rank // self.per_node}", log=f"logs/rank-{rank}.log")
            for rank in range(self.nodes * self.per_node)
        }
        self.watch.begin(1, ranks, self.now_s)
        for rank in ranks:
            self.mark(rank, Phase.START, 0)

    def mark(self, rank: int, phase: Phase, step: int, **more: Any) -> None:
        """A rank gets on."""
        known = {key: value for key, value in self.clocks.get(rank, {}).items() if key in ("own_ms", "own_steps")}
        self.clocks[rank] = {**known, "phase": phase, "step": step, "marked_s": self.now_s, **more}

    def mark_all(self, phase: Phase, step: int, **more: Any) -> None:
        for rank in self.clocks:
            self.mark(rank, phase, step, **more)

    def beat(self) -> None:
        """What the heartbeats of all agents say."""
        for node in set(range(self.nodes)) - self.silent:
            told = {
                str(rank): Clock(
                    age_s=self.now_s - clock["marked_s"],
                    **{key: value for key, value in clock.items() if key != "marked_s"},
                ).to_message()
                for rank, clock in self.clocks.items()
                if rank // self.per_node == node
            }
            self.watch.hear(node, 1, told, self.now_s)

    def pass_time(self, time_s: float) -> list[Effect]:
        """Nobody marks anything meanwhile. Returns what came of it, up to the first failure."""
        before = len(self.effects)
        until_s, beat_s = self.now_s + time_s, self.now_s
        while self.now_s < until_s and self.failure is None:
            self.now_s += 0.25
            if self.now_s - beat_s >= 1.0:
                beat_s = self.now_s
                self.beat()
            effects, self.failure = self.watch.tick(self.now_s)
            self.effects += effects
        return self.effects[before:]

    def answer(self, places: dict[int, Any], states: dict[int, str] | None = None) -> None:
        """All agents say where their workers are."""
        for node in range(self.nodes):
            told = {
                str(rank): {"frames": frames, "line": "", "state": (states or {}).get(rank, ""), "trouble": ""}
                for rank, frames in places.items()
                if rank // self.per_node == node
            }
            self.watch.answer(node, 1, told)


def asked(effects: list[Effect]) -> list[int | None]:
    return [effect.node for effect in effects if isinstance(effect, Send) and effect.message["type"] == "stacks"]


def hangs(effects: list[Effect]) -> list[dict[str, Any]]:
    return [effect.fields for effect in effects if isinstance(effect, Record) and effect.event == "hang"]


def watching(**limits: Any) -> Watch:
    return Watch(limits=Limits(**limits))


class TestLimits:
    def patience(self, *clocks: Clock, **limits: Any) -> Patience:
        made = Patience(limits=Limits(**limits))
        for clock in clocks:
            made.take(0, clock)
        return made

    def steps(self, done: int, **seconds: float) -> Clock:
        return Clock(phase=Phase.STEP, step=done, age_s=0.0, longest_s=longest(**seconds))

    def test_steps_are_learned_after_a_hundred_and_never_below_the_floor(self) -> None:
        first = self.steps(40, step=0.2)
        assert self.patience(first, learns=True).limit(Phase.STEP) == (UNKNOWN_S, "for the first steps")
        last = self.steps(40 + LEARN_STEPS, step=0.2)
        assert self.patience(first, last, learns=True).limit(Phase.STEP) == (FLOOR_S[Phase.STEP], "learned")
        slow = self.steps(40 + LEARN_STEPS, step=20.0)
        assert self.patience(first, slow, learns=True).limit(Phase.STEP) == (FACTOR * 20.0, "learned")

    def test_one_that_is_asked_for_is_exact_for_steps_and_the_least_for_all_else(self) -> None:
        clocks = [self.steps(0), self.steps(LEARN_STEPS, step=50.0, eval=1.0)]
        patience = self.patience(*clocks, timeout_s=2.5)
        assert patience.limit(Phase.STEP) == (2.5, "faults.hang_timeout")
        assert patience.limit(Phase.EVAL) == (FLOOR_S[Phase.EVAL], "learned")
        assert self.patience(*clocks, timeout_s=900.0).limit(Phase.EVAL) == (900.0, "learned")
        assert patience.limit(Phase.SAVE) == (FLOOR_S[Phase.SAVE], "for a save")
        assert patience.limit(Phase.START) == (FLOOR_S[Phase.START], "for the start")

    def test_an_evaluation_has_a_limit_of_its_own_once_one_was_seen(self) -> None:
        during = Clock(phase=Phase.EVAL, step=5, age_s=0.0, longest_s=longest(eval=30.0))
        assert self.patience(during, learns=True).limit(Phase.EVAL) == (UNKNOWN_S, "for the first evaluation")
        assert self.patience(self.steps(5, eval=30.0), learns=True).limit(Phase.EVAL) == (150.0, "learned")

    def test_a_script_without_a_clock_is_watched_only_where_it_was_asked_for(self) -> None:
        assert self.patience(learns=True).limit(Phase.NOTHING) is None
        patience = self.patience(timeout_s=20.0, has_phases=False)
        assert patience.limit(Phase.NOTHING) == (20.0, "faults.hang_timeout")

    def test_a_script_that_has_not_said_anything_is_not_restarted_soon(self) -> None:
        """It may be reading its weights: it would be restarted for ever."""
        patience = self.patience(timeout_s=20.0, has_phases=False, restarts=True)
        assert patience.limit(Phase.NOTHING, is_silent=True) == (UNKNOWN_S, "for the start")
        assert patience.limit(Phase.NOTHING) == (20.0, "faults.hang_timeout")
        perhaps = self.patience(timeout_s=20.0, has_phases=False, restarts_with_clock=True)
        assert perhaps.limit(Phase.NOTHING, is_silent=True) == (UNKNOWN_S, "for the start")
        only_said = self.patience(timeout_s=20.0, has_phases=False)
        assert only_said.limit(Phase.NOTHING, is_silent=True) == (20.0, "faults.hang_timeout")

    def test_preparing_data_may_take_any_time(self) -> None:
        """F073."""
        assert self.patience(timeout_s=20.0).limit(Phase.NOTHING) is None

    def test_a_step_of_a_script_may_hide_an_evaluation(self) -> None:
        clocks = [self.steps(0), self.steps(LEARN_STEPS, step=0.1)]
        assert self.patience(*clocks, learns=True, has_phases=False).limit(Phase.STEP) == (SCRIPT_FLOOR_S, "learned")


class TestHang:
    def test_one_frozen_rank_is_named_and_the_attempt_ends(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True), nodes=2, per_node=2)
        run.mark_all(Phase.STEP, 120)
        assert asked(run.pass_time(5.0)) == []
        assert asked(run.pass_time(2.0)) == [0, 1]
        run.answer({0: ALL_REDUCE, 1: ALL_REDUCE, 2: ALL_REDUCE, 3: LOADER})
        (hang,) = hangs(run.pass_time(0.25))
        assert hang["message"] == (
            "no step for 7.2 s (limit 5.0 s, faults.hang_timeout) at step 120: rank 3 on node 1 (n1) is in __next__ at "
            "/run/code/train.py:39 in step, 3 others wait in all_reduce at /run/code/train.py:41 in step"
        )
        assert [each["rank"] for each in hang["culprits"]] == [3]
        assert hang["waiting"]["ranks"] == [0, 1, 2]
        assert hang["action"] == "restart"
        assert run.failure is not None
        assert (run.failure.rank, run.failure.node, run.failure.cause) == (3, 1, Cause.HANG)
        assert (run.failure.step, run.failure.place) == (120, "/run/code/train.py:39 in step")

    @pytest.mark.parametrize(("phase", "action"), [(Phase.STEP, "restart"), (Phase.NOTHING, "report")])
    def test_a_script_that_may_have_a_step_clock_is_restarted_if_it_has(self, phase: Phase, action: str) -> None:
        run = Run(watching(timeout_s=5.0, restarts_with_clock=True, has_phases=False))
        run.mark_all(phase, 60)
        run.pass_time(7.0)
        run.answer({0: ALL_REDUCE, 1: LOADER})
        (hang,) = hangs(run.pass_time(0.25))
        assert (hang["action"], run.failure is not None) == (action, action == "restart")

    def test_a_heartbeat_that_took_its_time_is_no_progress(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        run.mark_all(Phase.STEP, 120)
        assert asked(run.pass_time(7.0)) == [0, 1]
        for clock in run.clocks.values():
            clock["marked_s"] += 0.3  # as it seems to the head, which counts from when it has heard
        assert asked(run.pass_time(1.5)) == [], "they were asked already"
        run.answer({0: ALL_REDUCE, 1: LOADER})
        (hang,) = hangs(run.pass_time(0.25))
        assert [each["rank"] for each in hang["culprits"]] == [1]

    def test_any_rank_that_gets_on_is_progress(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        for step in range(1, 20):
            run.mark(1, Phase.STEP, step)
            run.mark(0, Phase.STEP, 1, marked_s=100.0)
            assert asked(run.pass_time(4.0)) == []

    def test_long_phases_have_long_limits(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        run.mark_all(Phase.STEP, 3)
        run.mark(1, Phase.SAVE, 3)
        assert asked(run.pass_time(FLOOR_S[Phase.SAVE])) == []
        assert asked(run.pass_time(2.0)) == [0, 1]

    def test_the_start_has_a_limit_too(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        assert asked(run.pass_time(FLOOR_S[Phase.START])) == []
        run.pass_time(2.0)
        run.answer({0: LOADER, 1: ALL_REDUCE})
        (hang,) = hangs(run.pass_time(1.0))
        assert "(limit 30 min 00 s, for the start) before the first step: rank 0" in hang["message"]

    def test_without_an_answer_the_silence_is_what_is_said(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        run.mark_all(Phase.STEP, 3)
        run.pass_time(6.5)
        run.watch.answer(0, 1, {"0": {"frames": ALL_REDUCE, "line": "", "state": "", "trouble": ""}})
        assert hangs(run.pass_time(ANSWER_S - 1.0)) == []
        (hang,) = hangs(run.pass_time(2.0))
        assert [each["rank"] for each in hang["culprits"]] == [1]
        assert "its agent has not answered" in hang["message"]

    def test_what_a_silent_agent_said_last_is_no_news(self) -> None:
        """Whether its ranks get on is not known; that it is lost is for the head to say."""
        run = Run(watching(timeout_s=5.0, restarts=True))
        run.mark_all(Phase.STEP, 3)
        run.beat()
        run.silent = {1}
        assert asked(run.pass_time(30.0)) == []

    def test_a_limit_below_the_time_between_two_heartbeats_raises_no_alarm_while_steps_are_done(self) -> None:
        run = Run(watching(timeout_s=0.5, restarts=True))
        for step in range(1, 40):
            run.mark_all(Phase.STEP, step)
            assert asked(run.pass_time(0.25)) == []

    def test_progress_while_stacks_are_taken_ends_it_without_a_word(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        run.mark_all(Phase.STEP, 3)
        assert asked(run.pass_time(6.5)) == [0, 1]
        run.mark_all(Phase.STEP, 4)
        run.beat()
        run.answer({0: ALL_REDUCE, 1: ALL_REDUCE})
        assert run.pass_time(2.0) == []
        assert run.failure is None

    def test_a_whole_run_that_was_suspended_does_not_hang_when_it_goes_on(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        run.mark_all(Phase.STEP, 3)
        run.pass_time(2.0)
        run.now_s += max(FROZEN_S, 3600.0)
        run.beat()
        assert asked(run.pass_time(3.0)) == []
        assert asked(run.pass_time(4.0)) == [0, 1]

    def test_ranks_that_have_ended_do_not_count(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        run.mark_all(Phase.STEP, 3)
        run.beat()
        del run.clocks[0]
        assert asked(run.pass_time(6.5)) == [1]

    def test_a_new_attempt_knows_nothing_of_the_last(self) -> None:
        run = Run(watching(timeout_s=5.0, restarts=True))
        run.mark_all(Phase.STEP, 3)
        run.pass_time(4.0)
        run.watch.begin(2, {0: Rank(node=0, host="n0", log="l"), 1: Rank(node=1, host="n1", log="l")}, run.now_s)
        assert asked(run.pass_time(20.0)) == [], "what is heard is of the attempt before"

    def test_the_same_hang_again_is_a_repeated_one(self) -> None:
        failures = []
        for _ in range(2):
            run = Run(watching(timeout_s=5.0, restarts=True))
            run.mark_all(Phase.STEP, 120)
            run.pass_time(6.5)
            run.answer({0: ALL_REDUCE, 1: LOADER})
            run.pass_time(1.0)
            assert run.failure is not None
            failures.append(run.failure)
        assert repeats(failures[1], failures[0])

    @pytest.mark.parametrize("limits", [{}, {"learns": True, "has_phases": False}])
    def test_without_a_limit_nothing_is_watched(self, limits: dict[str, Any]) -> None:
        run = Run(watching(**limits))
        run.mark_all(Phase.NOTHING, 0)
        assert run.pass_time(1_000.0) == []


class TestReport:
    def test_it_is_said_again_when_it_has_lasted_twice_as_long_and_when_it_goes_on(self) -> None:
        run = Run(watching(timeout_s=10.0))
        run.mark_all(Phase.STEP, 7)

        def say(time_s: float) -> list[dict[str, Any]]:
            effects: list[Effect] = []
            for _ in range(int(time_s)):
                run.answer({0: ALL_REDUCE, 1: LOADER})
                effects += run.pass_time(1.0)
            return hangs(effects)

        assert len(say(13.0)) == 1
        assert say(9.0) == []
        assert len(say(6.0)) == 1
        assert run.failure is None
        said = [effect.text for effect in run.effects if isinstance(effect, Say)]
        assert all(text.endswith("; nothing is restarted (faults.on_hang)") for text in said)
        run.mark_all(Phase.STEP, 8)
        effects = run.pass_time(2.0)
        (over,) = [effect for effect in effects if isinstance(effect, Record)]
        assert (over.event, over.fields["step"]) == ("hang_over", 8)
        assert over.fields["waited_s"] == pytest.approx(28.0, abs=1.5)
        assert any("it goes on" in effect.text for effect in effects if isinstance(effect, Say))


class TestStragglers:
    def slow(self, own_ms: dict[int, float], windows: int, run: Run | None = None) -> Run:
        """Each rank's own work takes so long per step; ten steps a window."""
        run = run or Run(watching(learns=True), nodes=1, per_node=len(own_ms))
        for _ in range(windows):
            for rank, each_ms in own_ms.items():
                clock = run.clocks[rank]
                total_ms = clock.get("own_ms", 0.0) + 10 * each_ms
                done = clock.get("own_steps", 0) + 10
                run.mark(rank, Phase.STEP, clock["step"] + 10, own_ms=total_ms, own_steps=done)
            run.pass_time(3.25)
        return run

    def named(self, run: Run) -> list[dict[str, Any]]:
        return [e.fields for e in run.effects if isinstance(e, Record) and e.event == "straggler"]

    def test_one_that_is_slow_for_several_windows_is_named_once(self) -> None:
        run = self.slow({0: 12.0, 1: 42.0, 2: 13.0}, windows=12)
        (fields,) = self.named(run)
        assert fields == {"attempt": 1, "rank": 1, "node": 0, "host": "n0", "own_ms": 42.0, "others_ms": 12.5}
        said = [effect.text for effect in run.effects if isinstance(effect, Say)]
        assert said == [
            "straggler: rank 1 on node 0 (n0): 42 ms of own work per step, the others 12.5 ms: "
            "they wait for it at every step"
        ]

    def test_one_slow_window_is_nothing(self) -> None:
        run = self.slow({0: 12.0, 1: 12.0}, windows=2)
        for _ in range(4):
            run = self.slow({0: 12.0, 1: 60.0}, windows=2, run=run)
            run = self.slow({0: 12.0, 1: 12.0}, windows=1, run=run)
        assert self.named(run) == []

    @pytest.mark.parametrize("own_ms", [{0: 12.0, 1: 17.0}, {0: 1.0, 1: 5.0}, {0: 30.0}])
    def test_little_is_nothing(self, own_ms: dict[int, float]) -> None:
        assert self.named(self.slow(own_ms, windows=8)) == []
