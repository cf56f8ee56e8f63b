"""What the report of a run says of the times it stood still, and of ranks that the others waited for."""

from __future__ import annotations

from typing import Any

from launcher.runs.fold import fold
from launcher.runs.observed import Observation
from launcher.runs.stalls import stalls_text


def hang(time_s: float, waited_s: float, **fields: Any) -> dict[str, Any]:
    known = {"event": "hang", "attempt": 1, "message": f"no step for {waited_s:.0f} s", "action": "report"}
    return {**known, "time": time_s, "waited_s": waited_s, **fields}


STRAGGLER = {
    "event": "straggler", "time": 400.0, "attempt": 2, "rank": 1, "node": 0, "host": "n1", "own_ms": 42.0,
    "others_ms": 12.25,
}  # fmt: skip
LINE = "rank 1 on node 0 (n1): 42 ms of own work per step, the others 12.2 ms: they wait for it at every step"


def test_one_hang_is_one_line_however_often_it_was_said() -> None:
    over = {"event": "hang_over", "time": 170.0, "attempt": 1, "step": 7, "waited_s": 70.0}
    assert stalls_text([hang(130.0, 30.0), hang(160.0, 60.0), over]) == (
        "hang       attempt 1   no step for 60 s; it went on after 1m10s"
    )


def test_two_are_two_and_one_that_ended_the_attempt_says_so() -> None:
    events = [hang(130.0, 30.0), hang(300.0, 30.0, action="restart"), STRAGGLER]
    assert stalls_text(events).splitlines() == [
        "hang       attempt 1   no step for 30 s",
        "hang       attempt 1   no step for 30 s; the attempt was ended",
        f"straggler  attempt 2   {LINE}",
    ]


def test_a_run_that_got_on_has_none() -> None:
    assert stalls_text([{"event": "attempt_started", "attempt": 1, "time": 1.0}]) == ""


def test_a_record_knows_a_hang_while_it_lasts_and_the_stragglers_of_the_newest_attempt() -> None:
    began = [{"event": "created", "time": 1.0}, {"event": "attempt_started", "time": 2.0, "attempt": 1}]
    slow = {**STRAGGLER, "attempt": 1}

    def of(*events: dict[str, Any]) -> tuple[bool, int]:
        record = fold([*began, *events], Observation(alive=True), None)
        return record.hang is not None, len(record.stragglers)

    assert of(hang(130.0, 30.0), slow) == (True, 1)
    assert of(hang(130.0, 30.0), {"event": "hang_over", "time": 140.0}) == (False, 0)
    assert of(hang(130.0, 30.0), slow, {"event": "attempt_started", "time": 150.0, "attempt": 2}) == (False, 0)
    ended = fold([*began, hang(130.0, 30.0)], Observation(alive=True), {"state": "FAILED", "cause": "hang"})
    assert ended.hang is None
