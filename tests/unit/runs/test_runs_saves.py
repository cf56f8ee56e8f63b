"""What a report says of saves."""

from __future__ import annotations

from launcher.runs.saves import saves_text

PARTS = {"queue": 100.0, "start": 5.0, "train": 40.0, "eval": 8.0, "save": 2.0}


def test_each_kind_of_save_is_told_with_what_it_has_cost() -> None:
    events = [
        {"event": "checkpoint_saved", "step": 10, "time_s": 9.0, "blocked_s": 1.0},
        *({"event": "memory_saved", "step": step, "time_s": 1.0, "blocked_s": 0.1} for step in range(5)),
        {"event": "save_failed", "step": 20, "reason": "rank 1: No space left\nmore", "in_a_row": 1},
    ]
    assert saves_text(events, PARTS).splitlines() == [
        "checkpoints: 1, the training waited 1.00 s for them (2.0 % of its time)",
        "memory snapshots: 5, the training waited 0.50 s for them (1.0 % of its time)",
        "1 save failed, the last at step 20: rank 1: No space left",
    ]


def test_a_run_that_has_told_nothing_of_its_saves_has_no_line() -> None:
    """A script, or a run of an older version, whose saves say what they took and not what was waited for."""
    assert saves_text([{"event": "checkpoint_saved", "step": 1, "path": "x", "time_s": 2.0}], PARTS) == ""
    assert saves_text([], {}) == ""
    told = saves_text([{"event": "checkpoint_saved", "step": 1, "blocked_s": 0.0}], {})
    assert told == "checkpoints: 1, the training waited 0.00 s for them"


def test_what_went_to_a_url_and_what_did_not_is_told() -> None:
    url = "s3://bucket/runs/r0/checkpoints"
    done = [{"event": "uploaded", "step": step, "url": url, "size_bytes": 1, "time_s": 1.0} for step in (10, 30)]
    failed = {"event": "upload_failed", "step": 20, "url": url, "reason": "OSError: no route\nmore"}
    assert saves_text(done, {}) == f"uploads: 2 to {url}, the last of step 30"
    assert saves_text([failed], {}) == "uploads: 1 failed, the last at step 20: OSError: no route"
    assert saves_text([done[0], failed, done[1]], {}).endswith(
        "step 30; 1 failed, the last at step 20: OSError: no route"
    )
