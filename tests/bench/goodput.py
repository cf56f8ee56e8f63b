"""How much of the time a training with faults gets on: useful steps x the time of an undisturbed step / wall time.

`python tests/bench/goodput.py [--seconds 300] [--seed 0] [--more] [--json]`: 8 SIGKILLs of a worker and 2 of an agent
at seeded moments, the same ones for ours and for torchrun with a careful script (its best knobs, restarted by a loop
when it is killed itself). Time counts from the first step on. The time of an undisturbed step is the mean over those of
the same training that no fault fell into, saves included: what else the machine does meets both.
`--more`: a second table with one frozen worker (SIGSTOP) and nothing else. A link that is cut is `linkcut.py`'s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass

from common import CPU_NOTE
from training import CONTENDERS, EVERY, RANKS, Training

WORKER_KILLS, AGENT_KILLS = 8, 2
LIMIT = 0.95
_UP_S = 90.0
"""How long what is to be killed may take to be there: a fault that finds nobody waits for the next one."""


@dataclass(frozen=True)
class Fault:
    """What happens, how long after the first step, to which rank."""

    at_s: float
    what: str
    """worker, agent or freeze."""
    rank: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of a training."""

    goodput: float
    useful: int
    """Steps that count: the newest one."""
    lost: int
    """Steps that were made twice."""
    wall_s: float
    step_s: float
    start_s: float
    """From the command to the first step."""
    missed: int
    """Faults that found nobody to hit until the end."""


def plan_faults(seed: int, seconds: float) -> list[Fault]:
    """The seeded moments, none in the last tenth, so that a recovery is counted, too."""
    chance = random.Random(seed)
    what = ["worker"] * WORKER_KILLS + ["agent"] * AGENT_KILLS
    chance.shuffle(what)
    moments = sorted(chance.uniform(0.03, 0.9) * seconds for _ in what)
    return [Fault(at_s, kind, chance.randrange(RANKS)) for at_s, kind in zip(moments, what, strict=True)]


def freeze(seconds: float) -> list[Fault]:
    """One worker stands still, early enough for a time-out to end it."""
    return [Fault(seconds * 0.1, "freeze", 1)]


def undisturbed_step_s(steps: list[tuple[int, float]], faults_s: list[float]) -> float:
    """Mean time from one step to the next, without those that a fault fell into, or that were begun anew."""
    took = [
        after_s - before_s
        for (before, before_s), (after, after_s) in itertools.pairwise(steps)
        if after == before + 1 and not any(before_s <= at_s <= after_s for at_s in faults_s)
    ]
    return statistics.mean(took)


def go_through(training: Training, faults: list[Fault], *, seconds: float) -> Outcome:
    """Let the faults happen; what is left at the end."""
    frozen: list[int] = []
    happened_s: list[float] = []
    try:
        first_s = training.wait_for(1, limit_s=120.0)
        end_s, missed = first_s + seconds, 0
        for fault in faults:
            _sleep_until(first_s + fault.at_s)
            pid = _wait_for_victim(training, fault, until_s=min(end_s, time.time() + _UP_S))
            if pid is None:
                missed += 1
                continue
            os.kill(pid, signal.SIGSTOP if fault.what == "freeze" else signal.SIGKILL)
            happened_s.append(time.time())
            frozen += [pid] if fault.what == "freeze" else []
        _sleep_until(end_s)
        made = [(step, at_s) for step, at_s in training.steps() if at_s <= end_s]
        useful, step_s = max(step for step, _ in made), undisturbed_step_s(made, happened_s)
        return Outcome(
            goodput=useful * step_s / seconds,
            useful=useful,
            lost=len(made) - useful,
            wall_s=seconds,
            step_s=step_s,
            start_s=first_s - training.started_s,
            missed=missed,
        )
    finally:
        for pid in frozen:
            _wake(pid)
        training.close()


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.time()))


def _wait_for_victim(training: Training, fault: Fault, *, until_s: float) -> int | None:
    while time.time() < until_s:
        pid = training.agent() if fault.what == "agent" else training.worker(fault.rank)
        if pid is not None:
            return pid
        time.sleep(0.01)
    return None


def _wake(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def table(title: str, outcomes: dict[str, Outcome]) -> None:
    """For people."""
    print(f"\n{title}\n  {CPU_NOTE}")
    print(f"  {'':10} {'goodput':>8} {'useful':>8} {'made twice':>11} {'step':>9} {'start':>8} {'missed':>7}")
    for name, found in outcomes.items():
        print(
            f"  {name:10} {found.goodput:8.3f} {found.useful:8} {found.lost:11} {found.step_s * 1e3:6.1f} ms"
            f" {found.start_s:6.1f} s {found.missed:7}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each training, from its first step on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", action="store_true", help="a second table: one frozen worker")
    parser.add_argument("--json", action="store_true", help="a last line with the goodputs")
    options = parser.parse_args()
    faults = plan_faults(options.seed, options.seconds)
    outcomes = {contender.name: go_through(contender(), faults, seconds=options.seconds) for contender in CONTENDERS}
    kills = f"{WORKER_KILLS} workers and {AGENT_KILLS} agents killed in {options.seconds:g} s"
    table(f"Goodput: {kills}, a checkpoint every {EVERY} steps, seed {options.seed}", outcomes)
    if outcomes["launch"].goodput < LIMIT:
        print(f"  BELOW the limit of {LIMIT:.2f}")
    said = {"ratios": {"ours": outcomes["launch"].goodput, "torchrun": outcomes["torchrun"].goodput}}
    if options.more:
        frozen = {
            contender.name: go_through(contender(), freeze(options.seconds), seconds=options.seconds)
            for contender in CONTENDERS
        }
        table(f"Goodput: one worker frozen at {options.seconds * 0.1:g} s, and never woken", frozen)
        said["freeze"] = {"ours": frozen["launch"].goodput, "torchrun": frozen["torchrun"].goodput}
    if options.json:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
