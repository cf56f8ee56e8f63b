"""What a rehearsal finds: checks with their evidence, from the events and metrics of its runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from launcher.runs.events import Event, time_of
from launcher.wording import aligned, count, short_duration, signal_name

Record = Mapping[str, Any]
_CLOSE = 1e-4
"""Relative difference of losses on GPUs, whose kernels need not add up in the same order twice."""


class Result(StrEnum):
    """Of one check."""

    PASS = "pass"
    FAIL = "FAIL"
    UNKNOWN = "not checked"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    result: Result
    evidence: str
    """What was seen; of one that failed also what was expected; of one that was not made, why."""


def passed(name: str, evidence: str) -> Check:
    """A check that has found nothing wrong."""
    return Check(name, Result.PASS, evidence)


def failed(name: str, evidence: str) -> Check:
    """A finding."""
    return Check(name, Result.FAIL, evidence)


def unknown(name: str, evidence: str) -> Check:
    """What cannot be known here."""
    return Check(name, Result.UNKNOWN, evidence)


def is_pass(checks: Sequence[Check]) -> bool:
    """Whether something was checked and nothing of it failed."""
    results = [check.result for check in checks]
    return Result.FAIL not in results and Result.PASS in results


def check_row(check: Check) -> str:
    """A line of the table."""
    return f"{check.name:<13} {check.result.value:<12} {check.evidence}"


def verdict_line(checks: Sequence[Check], time_s: float) -> str:
    """The last line."""
    of = {result: sum(check.result is result for check in checks) for result in Result}
    parts = [count(of[Result.PASS], "check") + " passed"]
    parts += [f"{of[Result.FAIL]} failed"] if of[Result.FAIL] else []
    parts += [f"{of[Result.UNKNOWN]} not made"] if of[Result.UNKNOWN] else []
    return f"{'PASS' if is_pass(checks) else 'FAIL'} in {short_duration(time_s)}: {', '.join(parts)}"


def fields(checks: Sequence[Check]) -> list[dict[str, str]]:
    """The checks for programs."""
    words = {Result.PASS: "pass", Result.FAIL: "fail", Result.UNKNOWN: "unknown"}
    return [{"name": each.name, "result": words[each.result], "evidence": each.evidence} for each in checks]


def exit_check(what: str, code: int, wanted: int) -> Check:
    """Whether a command ended with the code that is documented for what happened to it."""
    meanings = {0: "done", 75: "stopped on request, saved"}
    meaning = meanings.get(code) or (signal_name(code - 128) if 128 < code < 160 else "a failure")
    text = f"{what}: exit {code} ({meaning})"
    return passed("exit code", text) if code == wanted else failed("exit code", f"{text}, expected {wanted}")


def trained_check(records: Sequence[Record], steps: int, code: int, took_s: float) -> Check:
    """Whether the undisturbed run has done all of its steps."""
    losses = _losses(records)
    if code or sorted(losses) != list(range(1, steps + 1)):
        return failed("trains", f"exit {code} after {len(losses)} of {steps} steps")
    text = f"{count(steps, 'step')} in {short_duration(took_s)}, loss {losses[1]:.4g} to {losses[steps]:.4g}"
    return passed("trains", text)


def losses_check(calm: Sequence[Record], disturbed: Sequence[Record], *, exact: bool) -> Check:
    """Whether every step of the disturbed run has the loss that it has in the undisturbed one."""
    wanted, found = _losses(calm), _losses(disturbed)
    if missing := sorted(wanted.keys() ^ found.keys()):
        return failed("losses", f"step {missing[0]} is in one of the two runs only")
    for step, loss in sorted(wanted.items()):
        same = found[step] == loss if exact else math.isclose(found[step], loss, rel_tol=_CLOSE)
        if not same:
            return failed("losses", f"step {step}: {loss!r} undisturbed, {found[step]!r} disturbed")
    how = "to the last bit" if exact else f"within {_CLOSE:g}"
    return passed("losses", f"{len(found)} of {len(wanted)} steps equal {how}")


def weights_check(calm: str | None, disturbed: str | None, *, exact: bool) -> Check:
    """Whether both runs end with the same weights."""
    if calm is None or disturbed is None:
        return failed("weights", "a run has not told them: it did not come to its end")
    if calm == disturbed:
        return passed("weights", f"sha256 {calm[:12]} at the end of both runs")
    if not exact:
        return unknown("weights", "they differ in the last bits, which GPUs do not promise; see the losses")
    return failed("weights", f"sha256 {calm[:12]} undisturbed, {disturbed[:12]} disturbed")


def samples_check(calm: Sequence[Record], disturbed: Sequence[Record]) -> Check:
    """Whether every step has taken up the samples where the one before it stopped: none left out, none twice."""
    wanted = {record["step"]: record["samples_seen"] for record in calm if "samples_seen" in record}
    found = {record["step"]: record["samples_seen"] for record in disturbed if "samples_seen" in record}
    if wanted != found:
        step = min(step for step in wanted.keys() | found.keys() if wanted.get(step) != found.get(step))
        text = f"step {step}: {wanted.get(step)} seen undisturbed, {found.get(step)} disturbed"
        return failed("samples", text)
    return passed("samples", f"{max(found.values(), default=0):,} seen, each once, in the same order")


def resumed_check(events: Sequence[Event], saved_step: int) -> Check:
    """Whether the training went on after the fault, and from no earlier step than it had saved."""
    starts = [event for event in events if event["event"] == "training_started"]
    if len(starts) < 2:
        return failed("goes on", "it was not started again")
    step, source = starts[-1]["step"], starts[-1].get("resumed_from")
    text = f"attempt {starts[-1]['attempt']} from {source or 'the beginning'}"
    rescued = [event for event in events if event["event"] == "rescued" and event.get("step") == step]
    text += ", kept by a rank that lived on" if rescued else ""
    if step < saved_step:
        return failed("goes on", f"{text}, though step-{saved_step} had been saved")
    return passed("goes on", text)


def script_resumed_check(events: Sequence[Event], newest: str, saved_s: float) -> Check:
    """Whether a script went on from its checkpoint, which was written at this time (seconds since the epoch).

    By its step clock: what it had said before the checkpoint is in it, and not to be done again.
    """
    told = next((e.get("resumes_from") for e in reversed(events) if e["event"] == "attempt_started"), None)
    said = [event for event in events if event["event"] == "progress"]
    before = [event for event in said if event["attempt"] == 1]
    after = [event["step"] for event in said if event["attempt"] > 1]
    if after and before:
        steps = [event["step"] for event in before]
        text = f"step {after[0]} was the first after the restart; before it, {steps[0]} to {steps[-1]}"
        saved = [event["step"] for event in before if time_of(event) < saved_s]
        if after[0] > max(saved, default=steps[0]):
            return passed("goes on", text)
        if saved:
            return failed("goes on", f"{text}: what {newest} holds was done again")
        return unknown("goes on", f"{text}, which it may have said before or after {newest}")
    if told:
        return passed("goes on", f"the restart was given {told}; that it is read is not seen without a step clock")
    if after:
        return unknown("goes on", f"its first step after the restart was {after[0]}; none was heard before it")
    return unknown("goes on", "where the script went on: it has no step clock (`progress:` or launch_client.progress)")


def leftovers_check(processes: Sequence[str], shared: Sequence[str]) -> Check:
    """Whether nothing of the runs is left on this machine."""
    if not (processes or shared):
        return passed("nothing left", "no process, nothing in /dev/shm")
    return failed("nothing left", "; ".join([*processes, *(f"/dev/shm/{name}" for name in shared)]))


def table(checks: Sequence[Check]) -> list[str]:
    """All checks as aligned lines."""
    return aligned([(check.name, check.result.value, check.evidence) for check in checks])


def _losses(records: Sequence[Record]) -> dict[int, float]:
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
